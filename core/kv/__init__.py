"""KV cache accounting: block ids, reference counts, hashes. No tensors."""
