"""Places for checkpoints: directories, pools, storage hosts and mirrors, by one interface."""
