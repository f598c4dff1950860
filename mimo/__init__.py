"""Reinforcement learning of language models whose samplers no longer match the trainer."""
