"""Methods of KV reuse, one file each."""
