"""Messages to tokens and back. Pure: no HTTP, no tensors."""
