"""Logits processors `allowed_token_ids`, `bad_words`, `logit_bias`: the fields of those names in `SamplingParams`."""
