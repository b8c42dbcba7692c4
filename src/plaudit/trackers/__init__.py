"""Send a run's figures to TensorBoard, W&B, MLflow or Trackio: a file for each, with its optional library."""
