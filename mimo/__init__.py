"""Reinforcement learning of language models whose samplers no longer match the trainer."""

__version__ = '0.1.0'
