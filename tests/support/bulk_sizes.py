"""Sizes of copies by the tensor memory accelerator."""

from __future__ import annotations

# In `bulk_copy.h`: kBulkChunk, kBulkSlots of them, and kBulkLeast.
CHUNK = 8192
RING = 5 * CHUNK
BULK_LEAST = 2 * CHUNK
