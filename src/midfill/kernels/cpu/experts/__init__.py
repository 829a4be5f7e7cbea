"""The MLP as a mixture of experts, compiled when a model has any."""
