"""Platform `cuda`: GPUs through torch, with decode steps replayed as CUDA graphs."""
