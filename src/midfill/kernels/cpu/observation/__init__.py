"""What observed rows attend to, compiled apart from the other kernels when first needed."""
