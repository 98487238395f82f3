// The one parallel loop of all kernels. Built with -fopenmp it runs on torch's own OpenMP threads; without, serially.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace bs {

enum class Order { Forward, Backward };

// Calls body(begin, end) for all blocks of [0, total).
//
// A thread takes several neighbouring blocks at a time: were blocks handed out one by one, two threads would touch the
// same fresh huge page of an output at the same moment, and the system would clear it twice. It takes a fraction of its
// fair share, so that a core that something else keeps busy does not hold up the others for long.
template <class Body>
void for_blocks(int64_t total, int64_t block, int threads, Body body, Order order = Order::Forward) {
    const int64_t blocks = (total + block - 1) / block;
    threads = int(std::min<int64_t>(threads, blocks));
    if (threads < 1) return;
    const int64_t turns = std::min<int64_t>(blocks, int64_t(threads) * 4);
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1)
    for (int64_t turn = 0; turn < turns; ++turn) {
        for (int64_t i = turn * blocks / turns; i < (turn + 1) * blocks / turns; ++i) {
            const int64_t begin = (order == Order::Forward ? i : blocks - 1 - i) * block;
            body(begin, std::min(begin + block, total));
        }
    }
}

// A sum over the blocks of a parallel loop.
class Sum {
public:
    void add(int64_t part) { total_.fetch_add(part, std::memory_order_relaxed); }
    int64_t value() const { return total_.load(std::memory_order_relaxed); }

private:
    std::atomic<int64_t> total_{0};
};

// Replaces each of n counts by the sum of those before it, where what was counted begins; returns the sum of all.
inline int64_t sums_before(int64_t* counts, int64_t n) {
    int64_t total = 0;
    for (int64_t i = 0; i < n; ++i) {
        const int64_t count = counts[i];
        counts[i] = total;
        total += count;
    }
    return total;
}

}  // namespace bs
