"""The interactive world model (LingBot-World-Fast): control, condition, causal DiT, sampler, decode."""
