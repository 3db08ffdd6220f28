"""From a prompt to a video one can look at: `park generate`, `park compare` and `park doctor`."""
