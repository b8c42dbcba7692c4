"""Send new weights from training ranks to engines that hold their own copy."""
