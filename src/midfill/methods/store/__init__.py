"""Methods that code stored KV."""
