"""What a training step holds, when, and how little memory it would fit in: traces, lifetimes, a static allocator."""
