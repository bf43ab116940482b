"""PyTorch's caching allocator of CUDA memory, without memory: what it would have in use, and take from the driver.

Follows ``c10/cuda/CUDACachingAllocator.cpp`` with the default settings. Sizes are in bytes.
"""

from __future__ import annotations

from bisect import bisect_left, insort

GRAIN = 512  # sizes are multiples of it
_SMALL = 1 << 20  # up to this size, memory is of the pool of small blocks
_SMALL_SEGMENT = 2 << 20
_MIDDLE, _MIDDLE_SEGMENT = 10 << 20, 20 << 20  # below the first, a segment has the second
_LARGE_GRAIN = 2 << 20  # else its size is a multiple of this


class NoMemoryLeftError(Exception):
    """An allocation for which the device has too little memory left, also without what is cached."""


class Block:
    """A piece of a segment: in use, or free.

    Attributes:
        size: its size, with what the allocator does not split off.
        pool: the pool to which it returns.
    """

    __slots__ = ("address", "before", "free", "next", "pool", "size")

    def __init__(self, address: int, size: int, pool: Pool) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.before: Block | None = None
        self.next: Block | None = None
        self.free = False


class Pool:
    """The free blocks, either small or large.

    Attributes:
        least_rest: the least size of what is split off a block.
        order: size and address of each free block, in the order in which they are tried.
        blocks: each free block by its address.
    """

    def __init__(self, least_rest: int) -> None:
        self.least_rest = least_rest
        self.order: list[tuple[int, int]] = []
        self.blocks: dict[int, Block] = {}

    def put(self, block: Block) -> None:
        """Add a free block."""
        block.free = True
        insort(self.order, (block.size, block.address))
        self.blocks[block.address] = block

    def take(self, place: int) -> Block:
        """Remove the free block at ``place`` of `order`."""
        block = self.blocks.pop(self.order.pop(place)[1])
        block.free = False
        return block

    def remove(self, block: Block) -> None:
        """Remove a free block."""
        self.take(bisect_left(self.order, (block.size, block.address)))


class CachingAllocator:
    """The allocator of one device.

    Args:
        limit: the memory that the device has for it.

    Attributes:
        allocated: `torch.cuda.memory_allocated`: the sizes of the blocks in use.
        max_allocated: the most of it so far.
        reserved: `torch.cuda.memory_reserved`: what the driver gave.
        max_reserved: the most of it so far.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.allocated = self.max_allocated = self.reserved = self.max_reserved = 0
        self._small, self._large = Pool(GRAIN), Pool(_SMALL + 1)
        self._next_address = 0

    def allocate(self, size: int) -> Block:
        """Return a block for ``size`` bytes, which is greater than 0.

        Raises:
            NoMemoryLeftError: the device has too little memory left.
        """
        size = -(-size // GRAIN) * GRAIN
        pool = self._small if size <= _SMALL else self._large
        place = bisect_left(pool.order, (size, 0))
        block = pool.take(place) if place < len(pool.order) else self._segment(size, pool)
        if block.size - size >= pool.least_rest:
            rest = Block(block.address + size, block.size - size, pool)
            rest.before, rest.next, block.next, block.size = block, block.next, rest, size
            if rest.next is not None:
                rest.next.before = rest
            pool.put(rest)
        self.allocated += block.size
        if self.allocated > self.max_allocated:
            self.max_allocated = self.allocated
        return block

    def free(self, block: Block) -> None:
        """Take back a block; it is merged with free neighbours."""
        self.allocated -= block.size
        pool, before, after = block.pool, block.before, block.next
        if before is not None and before.free:
            pool.remove(before)
            block.address, block.size, block.before = before.address, block.size + before.size, before.before
            if block.before is not None:
                block.before.next = block
        if after is not None and after.free:
            pool.remove(after)
            block.size, block.next = block.size + after.size, after.next
            if block.next is not None:
                block.next.before = block
        pool.put(block)

    def reset_peaks(self) -> None:
        """Begin with the peaks anew, as `torch.cuda.reset_peak_memory_stats` does."""
        self.max_allocated, self.max_reserved = self.allocated, self.reserved

    def release_cached(self) -> None:
        """Give the segments that are free back to the driver, as `torch.cuda.empty_cache` does."""
        for pool in (self._small, self._large):
            for block in list(pool.blocks.values()):
                if block.before is None and block.next is None:
                    pool.remove(block)
                    self.reserved -= block.size

    def _segment(self, size: int, pool: Pool) -> Block:
        wanted = _SMALL_SEGMENT if size <= _SMALL else _MIDDLE_SEGMENT if size < _MIDDLE else 0
        wanted = wanted or -(-size // _LARGE_GRAIN) * _LARGE_GRAIN
        if self.limit is not None and self.reserved + wanted > self.limit:
            self.release_cached()
            if self.reserved + wanted > self.limit:
                raise NoMemoryLeftError(f"no memory left for {size} bytes")
        self.reserved += wanted
        self.max_reserved = max(self.max_reserved, self.reserved)
        self._next_address += wanted  # of two free blocks of a size, that of the older segment is taken
        return Block(self._next_address - wanted, wanted, pool)
