"""Take a PyTorch model from one GPU to a supercomputer."""
