"""Loaders of trainers on meshes, whose number of data-parallel ranks, rows or weights change between two launches."""
