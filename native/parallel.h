// The one parallel loop of all kernels. Built with -fopenmp it runs on torch's own OpenMP threads; without, serially.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

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

// Scratch memory that the threads of a parallel loop take pieces of. Each has a huge page's worth for itself: were the
// pieces of two threads on one fresh page, the system would clear it twice.
class Slabs {
public:
    Slabs(const void* memory, int64_t room, int threads)
        : slab_(threads > 1 ? std::min(kHugePage, room / (4 * threads)) : room),
          next_(slab_ == kHugePage ? -int64_t(reinterpret_cast<uintptr_t>(memory) % kHugePage) : 0),
          room_(room),
          own_(size_t(threads)) {}

    // Where the memory has so many bytes for the calling thread; -1: there is no room.
    int64_t take(int64_t bytes) {
#ifdef _OPENMP
        Own& own = own_[size_t(omp_get_thread_num())];
#else
        Own& own = own_[0];
#endif
        if (own.end - own.begin < bytes) {
            const int64_t next = next_.fetch_add(slab_, std::memory_order_relaxed);
            own.begin = std::max<int64_t>(next, 0);
            own.end = std::min(next + slab_, room_);
            if (own.end - own.begin < bytes) return -1;
        }
        own.begin += bytes;
        return own.begin - bytes;
    }

private:
    static constexpr int64_t kHugePage = int64_t(2) << 20;
    struct alignas(64) Own {
        int64_t begin = 0, end = 0;
    };
    const int64_t slab_;
    std::atomic<int64_t> next_;
    const int64_t room_;
    std::vector<Own> own_;
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
