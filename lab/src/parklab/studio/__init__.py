"""From a prompt to a video one can look at: `park generate`, `park compare`, `park ablation` and `park doctor`."""
