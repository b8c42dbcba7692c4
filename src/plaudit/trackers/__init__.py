"""Send a run's figures to TensorBoard, W&B, MLflow, Trackio or Prometheus: a file for each, with its library."""
