"""Messages to token ids and back. Pure: no HTTP, no tensors."""
