"""Adapters for trainers: Accelerate, Hugging Face, Lightning, torchtitan."""
