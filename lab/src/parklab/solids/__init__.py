"""The second small video model: rendered solids with materials, lights and shadows, and sentences that name them."""
