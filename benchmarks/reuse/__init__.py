"""What methods of KV reuse save and cost: jumps of the caret, and files that were shown before."""
