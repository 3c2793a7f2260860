"""The operators of chunkc: their meaning, their task planning and their bodies."""
