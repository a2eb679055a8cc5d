"""Sessions: history, spans, gate, store. Pure Python: no tensors, no wire."""
