// Memory that values are decoded into, used again from layer to layer, and the totals of what is held: see
// stash/buffers.py and stash/live.py, which say why.
#include "run.h"

#include <algorithm>

namespace backstash::replay {
namespace {

int64_t bytes_of(const Layout& layout, at::ScalarType dtype) {
    const auto from = static_cast<int64_t>(c10::elementSize(layout.dtype));
    return layout.nbytes / from * static_cast<int64_t>(c10::elementSize(dtype));
}

}  // namespace

bool Buffer::is_free() const { return memory.storage().use_count() == 1 + static_cast<size_t>(whole.defined()); }

bool Buffer::is_awaited() const {
    return whole.defined() && has_owner && !owner.expired() && static_cast<int64_t>(whole._version()) == version;
}

at::Tensor Buffers::take(const Layout& layout, at::ScalarType dtype, bool waits) {
    lent_ = at::Tensor();
    keeps_ = 0;
    const auto options = at::TensorOptions().dtype(dtype).device(layout.device);
    const int64_t nbytes = bytes_of(layout, dtype);
    if (!layout.device.is_cpu() || nbytes < SMALLEST) return at::empty_strided(layout.sizes, layout.strides, options);
    if (is_planned || !waits) {
        at::Tensor memory = at::empty({nbytes}, at::kByte);
        advise_huge(memory);
        at::Tensor made = at::empty({0}, options);
        made.set_(memory.storage(), 0, layout.sizes, layout.strides);
        return made;
    }
    Buffer* best = nullptr;
    for (Buffer& each : buffers_) {
        if (each.nbytes() < nbytes || !each.is_free()) continue;
        const auto rank = [](const Buffer& b) { return std::make_pair(b.is_awaited(), b.nbytes()); };
        if (best == nullptr || rank(each) < rank(*best)) best = &each;
    }
    if (best == nullptr) {
        clear();
        Buffer fresh;
        fresh.memory = at::empty({nbytes}, at::kByte);
        advise_huge(fresh.memory);
        buffers_.push_back(std::move(fresh));
        best = &buffers_.back();
    }
    best->whole = at::Tensor();
    best->has_owner = false;
    at::Tensor made = at::empty({0}, options);
    made.set_(best->memory.storage(), 0, layout.sizes, layout.strides);
    return made;
}

at::Tensor Buffers::holding(const Slot& owner) const {
    for (const Buffer& each : buffers_)
        if (each.is_awaited() && each.owner.lock().get() == &owner) return each.whole;
    const bool is_lent = lent_.defined() && borrower_.lock().get() == &owner;
    return is_lent && static_cast<int64_t>(lent_._version()) == lent_version_ ? lent_ : at::Tensor();
}

void Buffers::lend(const std::shared_ptr<Slot>& owner, const at::Tensor& whole) {
    borrower_ = owner;
    lent_ = whole;
    lent_version_ = static_cast<int64_t>(whole._version());
}

void Buffers::filled(const std::shared_ptr<Slot>& owner, const at::Tensor& whole) {
    for (Buffer& each : buffers_) {
        if (storage_of(each.memory) != storage_of(whole)) continue;
        each.owner = owner;
        each.has_owner = true;
        each.whole = whole;
        each.version = static_cast<int64_t>(whole._version());
    }
}

void Buffers::forget(const Slot& owner) {
    for (Buffer& each : buffers_) {
        if (!each.has_owner || each.owner.lock().get() != &owner) continue;
        each.has_owner = false;
        each.whole = at::Tensor();
    }
    const auto borrower = borrower_.lock();  // which is gone if that is the owner, and it dies
    if (borrower == nullptr || borrower.get() == &owner) lent_ = at::Tensor();
}

void Buffers::part_with(const at::Tensor& whole) {
    lent_ = at::Tensor();
    std::erase_if(buffers_, [&](const Buffer& each) { return storage_of(each.memory) == storage_of(whole); });
}

void Buffers::release(const Slot& owner) {
    int64_t released = 0;
    for (const Buffer& each : buffers_)
        if (each.has_owner && each.owner.lock().get() == &owner) released += each.nbytes();
    keeps_ = std::max(keeps_, released);
    forget(owner);
    shrink(keeps_);
}

void Buffers::adopt(const at::Tensor& dead) {
    const int64_t nbytes = static_cast<int64_t>(dead.storage().nbytes());
    if (!dead.is_cpu() || nbytes < SMALLEST || is_planned) return;
    for (const Buffer& each : buffers_)
        if (each.nbytes() >= nbytes || storage_of(each.memory) == storage_of(dead)) return;
    clear();
    Buffer taken;
    taken.memory = at::empty({0}, at::kByte);
    taken.memory.set_(dead.storage(), 0, {nbytes}, {1});
    buffers_.push_back(std::move(taken));
}

void Buffers::shrink(int64_t keeps) {
    lent_ = at::Tensor();
    std::erase_if(buffers_, [&](const Buffer& each) {
        if (each.nbytes() < LARGE || !each.is_free()) return false;
        if (!each.is_awaited() || each.nbytes() > keeps) return true;
        keeps -= each.nbytes();
        return false;
    });
}

void Buffers::clear() {
    lent_ = at::Tensor();
    std::erase_if(buffers_, [](const Buffer& each) { return each.is_free(); });
}

int64_t Buffers::nbytes() const {
    int64_t all = 0;
    for (const Buffer& each : buffers_) all += each.nbytes();
    return all;
}

void Session::add(int64_t more) {
    nbytes += more;
    if (more > 0) peak_nbytes = std::max(peak_nbytes, nbytes + others_nbytes);
}

bool Session::has_room(int64_t more) {
    if (others_nbytes != 0)  // values that went the long way may have died since
        others_nbytes = PyLong_AsLongLong(call(others.get()).get());
    return nbytes + others_nbytes + remade_nbytes + more <= stashed_nbytes;
}

at::Tensor Session::take(const Layout& layout, at::ScalarType dtype) {
    const int64_t nbytes = bytes_of(layout, dtype);
    return buffers.take(layout, dtype, nbytes < SMALLEST || nbytes >= LARGE || has_room(nbytes));
}

}  // namespace backstash::replay
