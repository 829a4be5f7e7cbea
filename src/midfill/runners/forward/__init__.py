"""What a forward pass takes and gives: ForwardBatch and the Runner protocol."""
