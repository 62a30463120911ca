"""Training: config, data, optimizer, checkpoints, sampling, metrics and the loop. Loads nothing by itself."""
