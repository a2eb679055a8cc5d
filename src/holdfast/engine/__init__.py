"""The engine: token ids in, sampled token ids and logprobs out. It never sees text."""
