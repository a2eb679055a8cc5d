"""What a trainer reads: sessions as token ids, loss masks and logprobs, each with a certificate."""
