"""A model and its slabs: token ids in, token ids and logprobs out. Never sees text."""
