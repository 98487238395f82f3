// An accelerator in host memory, for tests on machines without one. tests/device/fake.py is its front and says what it
// is for.
//
// A device tensor's address lies in a region that nobody can read or write: a kernel of ours that took it for host memory
// would crash. Operations reach the same bytes through a second region, at the same offset. They run as the CPU's kernels,
// on CPU tensors that alias the device's memory.
//
// Streams have a clock each, and so has the host. In mode "late" an operation gets the time of its end when it is launched:
// after everything that its stream does before, and after a random delay. It runs when the host's clock has passed that
// time, together with all others in the order of their ends. So what a run does depends on the seed alone.

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Event.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sys/mman.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <queue>
#include <random>
#include <set>
#include <unordered_map>

namespace {

namespace py = pybind11;
using c10::Device;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;

constexpr auto kFake = c10::DeviceType::PrivateUse1;
constexpr size_t kArena = size_t(32) << 30;  // addresses, of which only those that are used take memory
constexpr size_t kGrain = 512;               // bytes: sizes are rounded up to a multiple, as CUDA's allocator does
constexpr int kPoison = 0xFF;                // a NaN of every floating dtype, -1 of every signed one

// ---------------------------------------------------------------------------------------------------------------------
// Counts

enum Kind { OPERATION, ALLOCATION, WAIT, QUERY, EVENT, BLOCK, SWITCH, PINNED, GENERATOR, KINDS };
const std::array<const char*, KINDS> kNames = {"operations", "allocations", "waits",  "queries",   "events",
                                               "blocks",     "switches",    "pinned", "generators"};

enum Mode { NOW, LATE, NOTHING };

Mode mode = NOW;
bool capturing = false;
std::recursive_mutex mutex;  // of all that follows but `listener`
std::array<int64_t, KINDS> counts{};
std::map<std::pair<std::string, std::string>, int64_t> names;
std::set<std::string> listened;  // the kinds whose call sites are asked for
std::function<void(std::string, std::string)>* listener = nullptr;
std::function<std::string()>* where = nullptr;
thread_local int in_kernel = 0;  // depth of `kernel` contexts, inside of which nothing counts

bool forbidden_in_capture(Kind kind) {
  return kind == WAIT || kind == QUERY || kind == PINNED || kind == GENERATOR;
}

// Takes the interpreter's lock, so it must be called without `mutex`.
void note(Kind kind, const char* name) {
  if (in_kernel && (kind == OPERATION || kind == ALLOCATION || kind == WAIT)) return;
  if (capturing && forbidden_in_capture(kind)) {
    std::string site = "?";
    if (where && Py_IsInitialized()) {
      py::gil_scoped_acquire gil;
      site = (*where)();
    }
    TORCH_CHECK(false, "A captured region asked for ", name, ", which counts among ", kNames[kind], " at ", site,
                ". A graph of the device cannot hold it: do it before the capture, or on the device.");
  }
  bool listening;
  {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    ++counts[kind];
    if (mode != NOTHING) ++names[{kNames[kind], name}];
    listening = listener && listened.count(kNames[kind]);
  }
  if (listening && Py_IsInitialized()) {
    py::gil_scoped_acquire gil;
    (*listener)(kNames[kind], name);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Streams in virtual time. The unit is about the host's time between two launches.

struct Pending {
  double end;
  int64_t number;  // of two that end at the same time the older runs first
  std::function<void()> run;
  bool operator>(const Pending& other) const { return std::tie(end, number) > std::tie(other.end, other.number); }
};

double host_clock = 0;
std::vector<double> tails{0.0};  // when a stream will have done all it was given
std::priority_queue<Pending, std::vector<Pending>, std::greater<>> pending;
int64_t launched = 0;
std::mt19937_64 randomness;
double mean_delay = 8;          // of operations that are late; every second one is
double bytes_per_unit = 1e6;    // of the link to the host
thread_local int64_t current_stream = 0;

double uniform() { return (randomness() >> 11) * 0x1.0p-53; }

// Runs what has ended by the host's clock. What it has run is destroyed by the caller, without the lock: a tensor's end
// may need the interpreter's lock.
using Done = std::vector<std::function<void()>>;

void run_ended(Done& done) {
  while (!pending.empty() && pending.top().end <= host_clock) {
    auto run = pending.top().run;
    pending.pop();
    done.push_back(run);
    run();
  }
}

void wait_until(double time) {
  Done done;
  std::lock_guard<std::recursive_mutex> lock(mutex);
  host_clock = std::max(host_clock, time);
  run_ended(done);
}

void record_run(std::function<void()> run);

void launch(int64_t stream, double duration, std::function<void()> run) {
  if (mode == NOTHING) return;
  record_run(run);
  Done done;
  std::lock_guard<std::recursive_mutex> lock(mutex);
  if (mode == NOW) {
    done.push_back(run);
    return run();
  }
  host_clock += uniform();
  double delay = uniform() < 0.5 ? 0.0 : -mean_delay * std::log1p(-uniform());
  tails[stream] = std::max(host_clock, tails[stream]) + delay + duration;
  pending.push({tails[stream], launched++, std::move(run)});
  run_ended(done);
}

// A graph: what was launched while it was captured, in order, and the pool that its memory comes from.
struct Graph {
  int64_t pool;
  std::vector<std::function<void()>> launched;
};
Graph* recording = nullptr;

// Whether what is launched now becomes a part of a graph. What a kernel of ours launches does not: the kernel does.
bool records() { return recording && !in_kernel; }

void record_run(std::function<void()> run) {
  if (!records()) return;
  std::lock_guard<std::recursive_mutex> lock(mutex);
  recording->launched.push_back(std::move(run));
}

double tail_of(int64_t stream) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  return tails.at(stream);
}

double last_tail() {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  return *std::max_element(tails.begin(), tails.end());
}

// ---------------------------------------------------------------------------------------------------------------------
// Memory

char* device_base = nullptr;  // no access
char* host_base = nullptr;    // the same bytes, for the kernels

struct Block {
  size_t offset, size;
  int64_t stream;             // on which it was allocated; kNull for a block whose bytes stay zero
  std::set<int64_t> used_on;  // other streams, of record_stream
  bool in_kernel;             // a temporary of a kernel, if it does not outlive it
  bool alive;
};

constexpr int64_t kNull = -1;
using Free = std::map<size_t, size_t>;  // offset -> size
std::map<int64_t, Free> free_memory;    // of each stream
std::vector<std::pair<double, Block>> waiting;  // freed, but other streams are using it until then
size_t top = 0;
size_t alive = 0, peak = 0, limit = std::numeric_limits<size_t>::max();
int64_t freed_count = 0;
thread_local std::vector<Block*> of_kernel;

char* host_pointer(const void* device_pointer) {
  return host_base + (static_cast<const char*>(device_pointer) - device_base);
}

void give_back(const Block& block) {
  auto& free = free_memory[block.stream];
  auto next = free.lower_bound(block.offset);
  size_t offset = block.offset, size = block.size;
  if (next != free.end() && next->first == offset + size) {
    size += next->second;
    next = free.erase(next);
  }
  if (next != free.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == offset) {
      offset = before->first;
      size += before->second;
      free.erase(before);
    }
  }
  free[offset] = size;
}

// Tells torch's profiler, which plans are made from.
void report(const Block& block, bool is_new) {
  int64_t size = block.size;
  c10::reportMemoryUsageToProfiler(device_base + block.offset, is_new ? size : -size, alive, top, Device(kFake, 0));
}

void poison(const Block& block) {
  if (mode != LATE || block.stream == kNull) return;
  launch(block.stream, 0, [=] { std::memset(host_base + block.offset, kPoison, block.size); });
}

void free_block(void* context) {
  Done done;
  std::lock_guard<std::recursive_mutex> lock(mutex);
  auto* block = static_cast<Block*>(context);
  ++freed_count;
  block->alive = false;
  if (!block->in_kernel) {
    alive -= block->size;
    report(*block, false);
  }
  if (mode == LATE && !block->used_on.empty()) {
    double until = 0;
    for (auto stream : block->used_on) until = std::max(until, tails[stream]);
    waiting.emplace_back(until, *block);
  } else {
    poison(*block);
    give_back(*block);
  }
  if (!block->in_kernel) delete block;  // else `leave_kernel` looks at it once more
}

void check_limit(size_t size) {
  TORCH_CHECK_WITH(OutOfMemoryError, alive + size <= limit, "The fake device was asked for ", size, " bytes, but ",
                   alive, " of its limit of ", limit, " bytes are allocated.");
}

Block* allocate_block(size_t nbytes) {
  size_t size = (nbytes + kGrain - 1) / kGrain * kGrain;
  std::lock_guard<std::recursive_mutex> lock(mutex);
  if (!in_kernel) check_limit(size);
  for (auto at = waiting.begin(); at != waiting.end();) {
    if (mode == LATE && at->first > host_clock) {
      ++at;
    } else {
      poison(at->second);
      give_back(at->second);
      at = waiting.erase(at);
    }
  }
  int64_t stream = recording ? recording->pool : mode == NOTHING ? kNull : current_stream;
  auto& free = free_memory[stream];
  auto found = std::find_if(free.begin(), free.end(), [=](const auto& range) { return range.second >= size; });
  size_t offset;
  if (found != free.end()) {
    offset = found->first;
    size_t rest = found->second - size;
    free.erase(found);
    if (rest) free[offset + size] = rest;
  } else {
    TORCH_CHECK_WITH(OutOfMemoryError, top + size <= kArena, "The fake device has no addresses left for ", size, " bytes.");
    offset = top;
    top += size;
  }
  auto* block = new Block{offset, size, stream, {}, in_kernel > 0, true};
  if (in_kernel) {
    of_kernel.push_back(block);
  } else {
    alive += size;
    peak = std::max(peak, alive);
    report(*block, true);
  }
  return block;
}

struct FakeAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    Device device(kFake, 0);
    if (nbytes == 0) return {nullptr, nullptr, &free_block, device};
    note(ALLOCATION, "memory");
    auto* block = allocate_block(nbytes);
    return {device_base + block->offset, block, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t nbytes) const override {
    note(OPERATION, "copy_data");
    launch(current_stream, 1, [=] { std::memcpy(host_pointer(to), host_pointer(from), nbytes); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    if (auto* block = static_cast<Block*>(pointer.get_context())) {
      std::lock_guard<std::recursive_mutex> lock(mutex);
      if (stream.id() != block->stream) block->used_on.insert(stream.id());
    }
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      (*bytes)[0].current = alive;
      (*bytes)[0].peak = peak;
    }
    stats.reserved_bytes[0].current = stats.reserved_bytes[0].peak = top;
    stats.allocation[0].allocated = counts[ALLOCATION];
    stats.allocation[0].freed = freed_count;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    peak = alive;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    size_t total = std::min(limit, kArena);
    return {total - std::min(alive, total), total};
  }
};

FakeAllocator allocator;

// Memory of the host that copies need not wait for.
std::map<const char*, size_t> pinned;

struct PinnedAllocator final : c10::Allocator {
  static void free(void* pointer) {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    pinned.erase(static_cast<char*>(pointer));
    std::free(pointer);
  }
  c10::DataPtr allocate(size_t nbytes) override {
    note(PINNED, "pinned memory");
    std::lock_guard<std::recursive_mutex> lock(mutex);
    void* pointer = std::aligned_alloc(64, (nbytes + 64) / 64 * 64);
    if (mode == LATE) std::memset(pointer, kPoison, nbytes);
    pinned[static_cast<char*>(pointer)] = nbytes;
    return {pointer, pointer, &free, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, std::size_t nbytes) const override { std::memcpy(to, from, nbytes); }
};

PinnedAllocator pinned_allocator;

bool is_pinned(const void* data) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  auto after = pinned.upper_bound(static_cast<const char*>(data));
  if (after == pinned.begin()) return false;
  auto found = std::prev(after);
  return static_cast<const char*>(data) < found->first + std::max<size_t>(found->second, 1);
}

// ---------------------------------------------------------------------------------------------------------------------
// Device guard, streams, events

struct Recorded {
  double time = -1;
};

struct FakeGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kFake; }
  Device exchangeDevice(Device) const override { return {kFake, 0}; }
  Device getDevice() const override { return {kFake, 0}; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(Device) const override { return stream(current_stream); }
  c10::Stream getDefaultStream(Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(Device, int) const override {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    tails.push_back(0);
    return stream(int64_t(tails.size()) - 1);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto last = stream(current_stream);
    if (last.id() != next.id()) note(SWITCH, "stream");
    current_stream = next.id();
    return last;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  bool queryStream(const c10::Stream& stream) const override {
    note(QUERY, "Stream.query");
    return passed(tail_of(stream.id()));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    note(WAIT, "Stream.synchronize");
    wait_until(tail_of(stream.id()));
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    note(WAIT, "synchronize");
    wait_until(last_tail());
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    note(EVENT, "Event.record");
    if (!*event) *event = new Recorded;
    static_cast<Recorded*>(*event)->time = tail_of(stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    note(BLOCK, "Stream.wait_event");
    std::lock_guard<std::recursive_mutex> lock(mutex);
    auto& tail = tails[stream.id()];
    tail = std::max(tail, static_cast<Recorded*>(event)->time);
  }
  bool queryEvent(void* event) const override {
    note(QUERY, "Event.query");
    return !event || passed(static_cast<Recorded*>(event)->time);
  }
  void synchronizeEvent(void* event) const override {
    note(WAIT, "Event.synchronize");
    if (event) wait_until(static_cast<Recorded*>(event)->time);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Recorded*>(event); }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    allocator.recordStream(pointer, stream);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    return static_cast<Recorded*>(second)->time - static_cast<Recorded*>(first)->time;
  }

 private:
  static c10::Stream stream(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, Device(kFake, 0), id); }
  static bool passed(double time) {
    if (mode != LATE) return true;
    double now;
    {
      std::lock_guard<std::recursive_mutex> lock(mutex);
      host_clock += uniform();
      now = host_clock;
    }
    wait_until(now);
    return time <= now;
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, FakeGuard)

// ---------------------------------------------------------------------------------------------------------------------
// Random numbers: a seed and how many operations have drawn from it, both on the host, as on CUDA

struct FakeGenerator final : c10::GeneratorImpl {
  FakeGenerator() : GeneratorImpl(Device(kFake, 0), DispatchKeySet(DispatchKey::PrivateUse1)) {}
  static c10::DeviceType device_type() { return kFake; }
  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    note(GENERATOR, "Generator.set_state");
    TORCH_CHECK(state.numel() == 16, "The fake device's generator has a state of 16 bytes, got ", state.numel(), ".");
    std::memcpy(&seed_, state.data(), 8);
    std::memcpy(&offset_, static_cast<const char*>(state.data()) + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    note(GENERATOR, "Generator.get_state");
    at::Tensor state = at::detail::empty_cpu({16}, at::kByte);
    std::memcpy(state.mutable_data_ptr(), &seed_, 8);
    std::memcpy(static_cast<char*>(state.mutable_data_ptr()) + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override { return c10::intrusive_ptr<GeneratorImpl>::reclaim(clone_impl()); }
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& state) override {
    seed_ = state->current_seed();
    offset_ = state->get_offset();
  }
  FakeGenerator* clone_impl() const override {
    auto* result = new FakeGenerator;
    result->seed_ = seed_;
    result->offset_ = offset_;
    return result;
  }
  uint64_t draw() { return seed_ * 0x9E3779B97F4A7C15u + 0xD1B54A32D192ED03u * ++offset_; }  // a seed for one operation

 private:
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

const at::Generator& default_generator() {
  static at::Generator generator = at::make_generator<FakeGenerator>();
  return generator;
}

// Runs `run` with the CPU's generator seeded for it.
void with_seed(uint64_t seed, const std::function<void()>& run) {
  auto generator = at::globalContext().defaultGenerator(c10::kCPU);
  auto state = generator.get_state();
  generator.set_current_seed(seed);
  run();
  generator.set_state(state);
}

// ---------------------------------------------------------------------------------------------------------------------
// Hooks

void resize_storage(c10::StorageImpl* storage, size_t nbytes) {
  auto next = allocator.allocate(nbytes);
  if (size_t kept = std::min(nbytes, storage->nbytes())) {
    auto* to = host_pointer(next.get());
    auto* from = host_pointer(storage->data());
    note(OPERATION, "resize_storage");
    launch(current_stream, 1, [=] { std::memcpy(to, from, kept); });
  }
  storage->set_data_ptr_noswap(std::move(next));
  storage->set_nbytes(nbytes);
}

struct FakeHooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<FakeGenerator>(); }
  Device getDeviceFromPtr(void*) const override { return {kFake, 0}; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), nbytes);
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// Operations

// CPU tensors that alias the device's memory. Those of one storage have one storage.
struct Aliases {
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages;

  at::Tensor of(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (tensor.device().type() != kFake) return mode == LATE || records() ? tensor.detach().clone() : tensor;
    TORCH_CHECK(tensor.layout() == c10::kStrided, "The fake device has strided tensors only, got ", tensor.layout(), ".");
    auto* key = tensor.storage().unsafeGetStorageImpl();
    auto found = storages.find(key);
    if (found == storages.end()) {
      void* pointer = key->data() ? host_pointer(key->data()) : nullptr;
      c10::DataPtr data(pointer, Device(c10::kCPU));
      c10::Storage storage(c10::Storage::use_byte_size_t(), key->nbytes(), std::move(data), c10::GetCPUAllocator(), true);
      found = storages.emplace(key, std::move(storage)).first;
    }
    auto alias = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(found->second), DispatchKeySet(DispatchKey::CPU), tensor.dtype());
    auto* impl = alias.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    alias._set_conj(tensor.is_conj());
    alias._set_neg(tensor.is_neg());
    return alias;
  }

  IValue of(const IValue& value) {
    if (value.isTensor()) return of(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(of(tensor));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
        list.push_back(tensor ? std::optional<at::Tensor>(of(*tensor)) : std::nullopt);
      return list;
    }
    if (value.isDevice()) return value.toDevice().type() == kFake ? IValue(Device(c10::kCPU)) : value;
    return value;
  }

  // Whether the CPU's storage is still the device's memory: a kernel that resizes an output gives it memory of its own.
  bool is_in_place(c10::StorageImpl* key) const {
    return storages.at(key).data() == (key->data() ? host_pointer(key->data()) : nullptr);
  }

  // The storage of the device that a result of the CPU lies in, if it does.
  c10::StorageImpl* owner_of(const at::Tensor& result) const {
    for (const auto& [key, storage] : storages)
      if (storage.unsafeGetStorageImpl() == result.storage().unsafeGetStorageImpl()) return key;
    return nullptr;
  }
};

// Leaves out what lies above the CPU's kernels: autograd, autocast, Python's modes.
struct CpuKernelsOnly {
  c10::impl::ForceDispatchKeyGuard guard{
      DispatchKeySet(DispatchKey::BackendSelect),
      c10::default_excluded_set | c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset};
};

at::Tensor device_tensor(c10::Storage storage, caffe2::TypeMeta dtype, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset) {
  auto result = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), DispatchKeySet(DispatchKey::PrivateUse1), dtype);
  result.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return result;
}

c10::Storage device_storage(size_t nbytes) {
  return {c10::Storage::use_byte_size_t(), nbytes, allocator.allocate(nbytes), &allocator, true};
}

// What an operation returns for arguments of certain shapes, learned when it first ran.
struct Result {
  bool is_tensor = false, is_defined = false;
  caffe2::TypeMeta dtype;
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;
  size_t nbytes = 0;
  IValue other;
};
using Results = std::vector<Result>;
using Key = std::pair<const c10::FunctionSchema*, std::vector<int64_t>>;
std::map<Key, Results> learned;

Result described(const at::Tensor& tensor) {
  Result result;
  result.is_tensor = true;
  result.is_defined = tensor.defined();
  if (tensor.defined()) {
    result.dtype = tensor.dtype();
    result.sizes = tensor.sizes().vec();
    result.strides = tensor.strides().vec();
    result.offset = tensor.storage_offset();
    result.nbytes = tensor.storage().nbytes();
  }
  return result;
}

bool add_to_key(std::vector<int64_t>& key, const IValue& value) {
  auto add_all = [&](auto values) {
    key.push_back(values.size());
    key.insert(key.end(), values.begin(), values.end());
  };
  auto add_double = [&](double number) {
    int64_t bits;
    std::memcpy(&bits, &number, 8);
    key.push_back(bits);
  };
  auto add_tensor = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return key.push_back(-1);
    key.push_back(int64_t(tensor.scalar_type()));
    add_all(tensor.sizes());
    add_all(tensor.strides());
  };
  if (value.isTensor()) add_tensor(value.toTensor());
  else if (value.isNone()) key.push_back(-2);
  else if (value.isInt()) key.push_back(value.toInt());
  else if (value.isBool()) key.push_back(value.toBool());
  else if (value.isDouble()) add_double(value.toDouble());
  else if (value.isIntList()) add_all(value.toIntVector());
  else if (value.isDevice() || value.isGenerator()) key.push_back(-3);
  else if (value.isTensorList()) {
    key.push_back(value.toTensorList().size());
    for (const at::Tensor& tensor : value.toTensorVector()) add_tensor(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) add_tensor(tensor ? *tensor : at::Tensor());
  } else if (value.isBoolList()) {
    for (bool flag : value.toBoolList()) key.push_back(flag);
  } else if (value.isDoubleList()) {
    for (double number : value.toDoubleVector()) add_double(number);
  } else if (value.isString()) {
    key.push_back(std::hash<std::string>()(value.toStringRef()));
  } else {
    return false;
  }
  return true;
}

// Gives an output the shape that its operation gives it.
void resize_as(const at::Tensor& output, const Result& result) {
  auto* storage = output.storage().unsafeGetStorageImpl();
  if (storage->nbytes() < result.nbytes) {
    storage->set_data_ptr_noswap(allocator.allocate(result.nbytes));
    storage->set_nbytes(result.nbytes);
  }
  output.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes, result.strides, result.offset);
}

// Takes a result of the CPU to the device. A result that lies in an argument's memory becomes a view of the argument.
at::Tensor to_device(const at::Tensor& result, const Aliases& aliases) {
  if (!result.defined()) return result;
  if (auto* owner = aliases.owner_of(result)) {
    auto storage = c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(owner));
    return device_tensor(std::move(storage), result.dtype(), result.sizes(), result.strides(), result.storage_offset());
  }
  TORCH_CHECK(result.layout() == c10::kStrided, "The fake device has strided tensors only, got ", result.layout(), ".");
  auto storage = device_storage(result.storage().nbytes());
  if (result.storage().nbytes() && mode != NOTHING)
    std::memcpy(host_pointer(storage.data()), result.storage().data(), result.storage().nbytes());
  return device_tensor(std::move(storage), result.dtype(), result.sizes(), result.strides(), result.storage_offset());
}

// Copies a result of the CPU into memory that was allocated for it before it was known.
void deliver(const at::Tensor& result, const Result& expected, char* to) {
  if (!result.defined() || result.storage().nbytes() == 0) return;
  if (result.sizes() == expected.sizes && result.strides() == expected.strides && result.storage().nbytes() == expected.nbytes &&
      result.storage_offset() == expected.offset) {
    std::memcpy(to, result.storage().data(), expected.nbytes);
    return;
  }
  TORCH_CHECK(result.sizes() == expected.sizes, "An operation's result has another shape than when it ran first.");
  c10::Storage storage(c10::Storage::use_byte_size_t(), expected.nbytes, c10::DataPtr(to, Device(c10::kCPU)), nullptr, false);
  auto target = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), DispatchKeySet(DispatchKey::CPU), result.dtype());
  target.unsafeGetTensorImpl()->set_sizes_and_strides(expected.sizes, expected.strides, expected.offset);
  target.copy_(result);
}

// Where a captured operation's result goes in each replay: that number of the stack, and of the list there.
struct Delivered {
  size_t position, item;
  Result result;
  char* memory;
};

// What the fallback asks of an operation's schema.
struct Traits {
  bool waits = false;          // its result's size or value is needed on the host
  bool draws = false;          // random numbers
  bool returns_views = false;  // of its arguments
  size_t fresh = 0;                // results that are new tensors
  std::vector<size_t> written;     // tensors among its arguments that it writes into, and returns if it returns anything
};

const Traits& traits_of(const c10::OperatorHandle& op) {
  static std::unordered_map<const c10::FunctionSchema*, Traits> known;
  std::lock_guard<std::recursive_mutex> lock(mutex);
  const auto& schema = op.schema();
  auto found = known.find(&schema);
  if (found != known.end()) return found->second;
  // Only masks among indices make these wait, and torch finds their elements with an operation of its own.
  static const std::set<std::string> do_not_wait{"aten::index", "aten::_index_put_impl_", "aten::index_put_"};
  Traits traits;
  traits.waits = !do_not_wait.count(schema.name()) &&
                 (op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape));
  traits.draws = op.hasTag(at::Tag::nondeterministic_seeded);
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto& argument = schema.arguments()[i];
    const bool is_list = argument.type()->isSubtypeOf(*c10::ListType::ofTensors());  // whose tensors are never returned
    if (argument.alias_info() && argument.alias_info()->isWrite() && !is_list) traits.written.push_back(i);
  }
  for (const auto& result : schema.returns()) {
    traits.fresh += !result.alias_info();
    traits.returns_views |= result.alias_info() && !result.alias_info()->isWrite();
  }
  return known.emplace(&schema, std::move(traits)).first->second;
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack& stack, std::optional<uint64_t> seed) {
  CpuKernelsOnly guard;
  if (seed)
    with_seed(*seed, [&] { op.callBoxed(&stack); });
  else
    op.callBoxed(&stack);
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& traits = traits_of(op);
  const size_t count = schema.arguments().size();
  if (traits.waits) note(WAIT, schema.name().c_str());
  note(OPERATION, schema.name().c_str());

  const auto stream = current_stream;
  auto arguments = torch::jit::last(*stack, count);
  const std::vector<IValue> originals(arguments.begin(), arguments.end());
  std::vector<at::Tensor> written;
  const bool is_prompt = traits.waits || traits.returns_views;  // it must run before this returns
  bool resizes = false;
  for (auto i : traits.written) {
    written.push_back(originals[i].isTensor() ? originals[i].toTensor() : at::Tensor());
    resizes |= written.back().defined() && written.back().numel() == 0;
  }
  std::optional<uint64_t> seed;
  auto* generator = default_generator().get<FakeGenerator>();
  if (traits.draws) {
    for (const auto& value : originals)
      if (value.isGenerator() && value.toGenerator().device().type() == kFake) generator = value.toGenerator().get<FakeGenerator>();
    seed = generator->draw();
  }
  std::shared_ptr<Aliases> aliases;
  auto on_cpu = [&] {
    aliases = std::make_shared<Aliases>();
    torch::jit::Stack result;
    for (const auto& value : originals) result.push_back(value.isGenerator() ? IValue() : aliases->of(value));
    return result;
  };
  auto drop_arguments = [&] { torch::jit::drop(*stack, count); };

  // What the results will look like, if arguments like these have been seen before.
  Key key{&schema, {}};
  bool can_learn = !is_prompt && (traits.fresh ? written.empty() : resizes);
  for (const auto& value : originals) can_learn = can_learn && add_to_key(key.second, value);
  const Results* results = nullptr;
  if (can_learn && mode != NOW) {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    auto found = learned.find(key);
    if (found != learned.end()) results = &found->second;
  }

  if (mode != NOW && !is_prompt && traits.fresh == 0 && (!resizes || results)) {
    for (size_t i = 0; resizes && i < written.size(); ++i)
      if (written[i].defined()) resize_as(written[i], (*results)[i]);
    if (mode == LATE) launch(stream, 1, [op, seed, values = on_cpu()]() mutable { run_on_cpu(op, values, seed); });
    drop_arguments();
    if (!schema.returns().empty())
      for (auto& tensor : written) stack->emplace_back(std::move(tensor));
    return;
  }
  if (results) {
    torch::jit::Stack values;
    if (mode == LATE) values = on_cpu();
    drop_arguments();
    std::vector<char*> memory;
    for (const auto& result : *results) {
      memory.push_back(nullptr);
      if (!result.is_tensor) {
        stack->push_back(result.other);
      } else if (!result.is_defined) {
        stack->emplace_back(at::Tensor());
      } else {
        auto storage = device_storage(result.nbytes);
        if (result.nbytes) memory.back() = host_pointer(storage.data());
        stack->emplace_back(device_tensor(std::move(storage), result.dtype, result.sizes, result.strides, result.offset));
      }
    }
    if (mode == LATE)
      launch(stream, 1, [op, seed, results, memory, values = std::move(values)]() mutable {
        run_on_cpu(op, values, seed);
        CpuKernelsOnly guard;
        for (size_t i = 0; i < memory.size(); ++i)
          if (memory[i]) deliver(values[i].toTensor(), (*results)[i], memory[i]);
      });
    return;
  }

  // Now. In mode "late" everything that its stream was given before has to be over.
  if (mode == LATE) wait_until(tail_of(stream));
  auto values = on_cpu();
  const auto given = values;
  std::vector<Delivered> delivered;  // results in memory of their own
  auto take = [&](size_t i, size_t item, const at::Tensor& tensor) {
    auto result = to_device(tensor, *aliases);
    if (records() && tensor.defined() && tensor.storage().nbytes() && !aliases->owner_of(tensor))
      delivered.push_back({i, item, described(tensor), host_pointer(result.storage().data())});
    return result;
  };
  {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    run_on_cpu(op, values, seed);
  }
  bool has_resized = false;
  for (size_t number = 0; number < written.size(); ++number) {
    const auto& original = written[number];
    if (!original.defined()) continue;
    const auto& alias = given[traits.written[number]].toTensor();
    if (alias.sizes() == original.sizes()) continue;  // else the kernel has resized it
    has_resized = true;
    resize_as(original, described(alias));
    auto* storage = original.storage().unsafeGetStorageImpl();
    if (mode != NOTHING && !aliases->is_in_place(storage))
      std::memcpy(host_pointer(storage->data()), alias.storage().data(), alias.storage().nbytes());
  }

  drop_arguments();
  Results fresh;
  if (traits.fresh == 0)
    for (const auto& tensor : written) fresh.push_back(described(tensor));
  size_t number = 0;
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    auto* info = schema.returns()[i].alias_info();
    const IValue& value = values.at(i);
    if (info && info->isWrite()) {
      stack->emplace_back(written.at(number++));
    } else if (value.isTensor()) {
      const auto& tensor = value.toTensor();
      fresh.push_back(described(tensor));
      can_learn = can_learn && !(tensor.defined() && aliases->owner_of(tensor));
      stack->emplace_back(take(i, 0, tensor));
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(take(i, list.size(), tensor));
      stack->emplace_back(std::move(list));
      can_learn = false;
    } else {
      fresh.push_back({});
      fresh.back().other = value;
      stack->push_back(value);
    }
  }
  if (can_learn) {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    learned.emplace(std::move(key), std::move(fresh));
  }
  if (!records()) return;
  if (!seed) generator = nullptr;
  record_run([op, generator, again_given = has_resized ? on_cpu() : given, delivered] {
    auto again = again_given;
    run_on_cpu(op, again, generator ? std::optional<uint64_t>(generator->draw()) : std::nullopt);
    CpuKernelsOnly guard;
    for (const auto& [i, item, result, memory] : delivered)
      deliver(again[i].isTensor() ? again[i].toTensor() : again[i].toTensorVector()[item], result, memory);
  });
}

// Copies, in both directions and on the device. A copy from or to memory that is not pinned waits, as on CUDA.
at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.is_same(source) || self.numel() == 0) return self;
  const bool out = self.device().type() != kFake, in = source.device().type() != kFake;
  const auto stream = current_stream;
  auto aliases = std::make_shared<Aliases>();
  if (!out && !in) {
    note(OPERATION, "aten::copy_");
    auto to = aliases->of(self), from = aliases->of(source);
    launch(stream, 1, [=] {
      CpuKernelsOnly guard;
      to.copy_(from);
    });
    return self;
  }
  const auto& host = out ? self : source;
  TORCH_CHECK(host.device().type() == c10::kCPU, "The fake device copies from and to the CPU, got ", host.device(), ".");
  const bool waits = !non_blocking || !is_pinned(host.const_data_ptr());
  const char* name = out ? "copy to the host" : "copy from the host";
  if (waits) note(WAIT, name);
  note(OPERATION, name);
  at::Tensor to = out ? self.detach() : aliases->of(self);
  at::Tensor from = out ? aliases->of(source) : source.detach();
  if (mode == NOTHING && out) {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    CpuKernelsOnly guard;
    to.zero_();
    return self;
  }
  launch(stream, double(source.nbytes()) / bytes_per_unit, [=] {
    CpuKernelsOnly guard;
    to.copy_(from);
  });
  if (waits) wait_until(tail_of(stream));
  return self;
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& to, bool non_blocking) {
  at::Tensor target = to;
  return copy_(target, source, non_blocking);
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& to) {
  at::Tensor target = to;
  target.resize_(source.sizes());
  return copy_(target, source, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  note(WAIT, "item");
  note(OPERATION, "copy to the host");
  wait_until(tail_of(current_stream));
  if (mode == NOTHING) return at::_local_scalar_dense(at::zeros({}, self.options().device(c10::kCPU)));
  std::lock_guard<std::recursive_mutex> lock(mutex);
  Aliases aliases;
  auto alias = aliases.of(self);
  CpuKernelsOnly guard;
  return at::_local_scalar_dense(alias);
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device>,
                 std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only memory of the host can be pinned.");
  return at::detail::empty_generic(size, &allocator, DispatchKeySet(DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator, DispatchKeySet(DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) {
    auto nbytes = at::detail::computeStorageNbytesContiguous(size, self.itemsize(), self.storage_offset());
    auto* storage = self.storage().unsafeGetStorageImpl();
    if (nbytes > storage->nbytes()) resize_storage(storage, nbytes);
    impl->set_sizes_contiguous(size);
  }
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, c10::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(storage), offset, size, stride);
}

at::Tensor& set_whole_storage(at::Tensor& self, c10::Storage storage) { return at::native::set_(self, std::move(storage)); }

void record_stream(at::Tensor& self, c10::Stream stream) { allocator.recordStream(self.storage().data_ptr(), stream); }

// The choice of the CPU: attention is one operation, with the bits of the CPU.
int64_t sdp_choice(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask,
                   double dropout, bool is_causal, std::optional<double> scale, bool enable_gqa) {
  Aliases aliases;
  auto q = aliases.of(query), k = aliases.of(key), v = aliases.of(value);
  std::optional<at::Tensor> m;
  if (mask) m = aliases.of(*mask);
  CpuKernelsOnly guard;
  return at::_fused_sdp_choice(q, k, v, m, dropout, is_causal, scale, enable_gqa);
}

}  // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sdp_choice)
}

namespace {

using Boxed = torch::CppFunction;
Boxed boxed() { return Boxed::makeFromBoxedFunction<&fallback>(); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(boxed()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("copy_", &copy_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("record_stream", &record_stream);
  // One operation on CUDA too, though torch has a definition for any device.
  for (const char* name : {"convolution", "convolution_backward", "native_layer_norm", "native_group_norm",
                           "native_group_norm_backward", "native_dropout", "native_dropout_backward", "_fused_rms_norm",
                           "_fused_rms_norm_backward"})
    m.impl(name, boxed());
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames())
    if (name.name.rfind("aten::_foreach_", 0) == 0)
      m.impl((name.name + (name.overload_name.empty() ? "" : "." + name.overload_name)).c_str(), boxed());
}

// ---------------------------------------------------------------------------------------------------------------------
// For fake.py

void set_mode(const std::string& next, uint64_t seed, double delay, double gigabytes) {
  wait_until(last_tail());
  std::lock_guard<std::recursive_mutex> lock(mutex);
  mode = next == "late" ? LATE : next == "nothing" ? NOTHING : NOW;
  randomness.seed(seed);
  mean_delay = delay;
  bytes_per_unit = gigabytes * 1e4;  // a unit is 10 microseconds
}

void enter_kernel(const std::string& name, int waits) {
  note(OPERATION, name.c_str());
  for (; waits; --waits) note(WAIT, name.c_str());
  ++in_kernel;
}

// Temporaries of a kernel count for nothing; what outlives it is what the kernel would have allocated.
void leave_kernel() {
  if (--in_kernel) return;
  std::vector<Block*> blocks;
  blocks.swap(of_kernel);
  size_t left = 0;
  {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    for (auto* block : blocks) {
      if (block->alive) {
        block->in_kernel = false;
        alive += block->size;
        report(*block, true);
        ++left;
      } else {
        delete block;
      }
    }
    peak = std::max(peak, alive);
  }
  while (left--) note(ALLOCATION, "memory");
  check_limit(0);
}

// ---------------------------------------------------------------------------------------------------------------------
// Graphs. To capture one computes on CUDA nothing. Here it computes, because kernels of ours look at numbers to know what
// they return; at its end all memory is as it was, and new memory is spoiled.

struct Before {
  std::vector<char> device;
  std::map<char*, std::vector<char>> pinned;
  uint64_t seed, offset;  // of the generator
};
std::unique_ptr<Before> before;
int64_t pools = 0;

Graph* begin_graph(std::optional<int64_t> pool) {
  TORCH_CHECK(!recording, "A graph of the fake device is being captured already.");
  TORCH_CHECK(mode == NOW, "The fake device captures graphs while its operations run at once.");
  std::lock_guard<std::recursive_mutex> lock(mutex);
  before = std::make_unique<Before>();
  before->device.assign(host_base, host_base + top);
  for (const auto& [data, nbytes] : pinned) before->pinned[const_cast<char*>(data)].assign(data, data + nbytes);
  before->seed = default_generator().current_seed();
  before->offset = default_generator().get<FakeGenerator>()->get_offset();
  recording = new Graph{pool.value_or(kNull - ++pools), {}};
  capturing = true;
  return recording;
}

void end_graph() {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  capturing = false;
  recording = nullptr;
  std::memcpy(host_base, before->device.data(), before->device.size());
  std::memset(host_base + before->device.size(), kPoison, top - before->device.size());
  for (const auto& [data, bytes] : before->pinned)
    if (pinned.count(data)) std::memcpy(data, bytes.data(), bytes.size());
  default_generator().get<FakeGenerator>()->set_current_seed(before->seed);
  default_generator().get<FakeGenerator>()->set_offset(before->offset);
  before.reset();
}

// Runs what was captured, after everything that its stream was given before. It is one operation of the host.
void replay(const Graph& graph) {
  TORCH_CHECK(!recording, "A graph was replayed while another one is captured.");
  note(OPERATION, "graph");
  if (mode == NOTHING) return;
  if (mode == LATE) wait_until(tail_of(current_stream));
  ++in_kernel;
  for (const auto& run : graph.launched) run();
  leave_kernel();
}

// The same memory, which the result does not hold.
at::Tensor unowned(const at::Tensor& tensor) {
  const auto& storage = tensor.storage();
  c10::DataPtr data(storage.mutable_data(), Device(kFake, 0));
  return device_tensor({c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), &allocator, false}, tensor.dtype(),
                       tensor.sizes(), tensor.strides(), tensor.storage_offset());
}

PYBIND11_MODULE(fake_device, m) {
  auto reserve = [](int protection) {
    void* region = mmap(nullptr, kArena, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(region != MAP_FAILED, "The fake device could not reserve ", kArena, " bytes of addresses.");
    return static_cast<char*>(region);
  };
  device_base = reserve(PROT_NONE);
  host_base = reserve(PROT_READ | PROT_WRITE);
  c10::SetAllocator(kFake, &allocator);
  at::RegisterPrivateUse1HooksInterface(new FakeHooks);

  m.def("set_mode", &set_mode, py::call_guard<py::gil_scoped_release>());
  m.def("set_capturing", [](bool value) { capturing = value; });
  py::class_<Graph>(m, "Graph").def_property_readonly("pool", [](const Graph& graph) { return graph.pool; });
  m.def("begin_graph", &begin_graph, py::return_value_policy::take_ownership);
  m.def("end_graph", &end_graph);
  m.def("replay", &replay);
  m.def("records", &records);
  m.def("record", [](py::function function) { record_run([function] { function(); }); });
  m.def("unowned", &unowned);
  m.def("set_limit", [](std::optional<size_t> bytes) { limit = bytes.value_or(std::numeric_limits<size_t>::max()); });
  m.def("set_site", [](std::function<std::string()> function) { where = new auto(std::move(function)); });
  m.def("listen", [](std::set<std::string> kinds, std::function<void(std::string, std::string)> function) {
    delete listener;
    listener = function ? new auto(std::move(function)) : nullptr;
    listened = std::move(kinds);
  });
  m.def("counts", [] {
    std::map<std::string, int64_t> result;
    std::lock_guard<std::recursive_mutex> lock(mutex);
    for (int kind = 0; kind < KINDS; ++kind) result[kNames[kind]] = counts[kind];
    return result;
  });
  m.def("names", [] {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    return names;
  });
  m.def("clock", [] { return std::make_pair(host_clock, last_tail()); });
  m.def("pending", [] { return pending.size(); });
  m.def("rng_state", [] {
    auto state = at::Tensor(default_generator().get<FakeGenerator>()->get_state());
    return py::bytes(static_cast<const char*>(state.const_data_ptr()), state.numel());
  });
  m.def("set_rng_state", [](std::string state) {
    auto tensor = at::detail::empty_cpu({int64_t(state.size())}, at::kByte);
    std::memcpy(tensor.mutable_data_ptr(), state.data(), state.size());
    default_generator().get<FakeGenerator>()->set_state(*tensor.unsafeGetTensorImpl());
  });
  m.def("manual_seed", [](uint64_t seed) { default_generator().get<FakeGenerator>()->set_current_seed(seed); });
  m.def("initial_seed", [] { return default_generator().get<FakeGenerator>()->current_seed(); });
  m.def("enter_kernel", &enter_kernel);
  m.def("leave_kernel", &leave_kernel);
}

}  // namespace

namespace {

// What autocast casts: torch's own lists.
namespace autocast {

using namespace at;  // torch's lists name their types so

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FLOAT32_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FLOAT32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FLOAT32_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(WIDEST)
}

}  // namespace autocast

}  // namespace
