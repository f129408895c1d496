// Lets g++ compile the text of a CUDA kernel and runs it on the CPU: slowly, but by CUDA's rules.
//
// A block is an operating system's thread, so that blocks may wait for each other through memory.
// A CUDA thread is a fiber of it, which runs until it waits: for its block, for the lanes that a
// warp primitive names, or a turn after an atomic. What is undefined on a GPU is made to show:
// shared memory starts with rubbish, warps run far ahead of each other in orders that differ
// between blocks, and a product and a sum become one operation wherever the compiler may do that.
// If no thread of a block can go on, the launch ends with a message that says who waits for whom.
#pragma once

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/mman.h>
#include <time.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#define DGL_MGPU_EMULATED 1

namespace emulation {

constexpr unsigned kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr size_t kStackBytes = 128 << 10;
constexpr int kRubbish = 0xCD;
constexpr int kMessageBytes = 2000;

struct Dim {
  unsigned x, y, z;
};

// A kernel and its arguments, one slot of 8 bytes each.
struct Launch {
  void (*call)(void (*kernel)(), const uint64_t* slots);
  void (*kernel)();
  const uint64_t* slots;
  unsigned blocks, threads;
  unsigned next_block = 0;
  bool failed = false;
  char message[kMessageBytes] = "";
};

struct Thread;

// What a warp primitive gives to one lane, when all lanes of its mask have come to it.
using Combine = uint64_t (*)(const Thread* warp, const Thread& lane);

enum class State { kReady, kAtBarrier, kInWarp, kReturned };

struct Thread {
  unsigned index, lane;
  State state;
  // The warp primitive it is in.
  const char* primitive;
  Combine combine;
  unsigned mask;
  uint64_t value;
  unsigned operand, width;
  uint64_t result;
  // The fiber.
  bool started;
  ucontext_t start;
  jmp_buf context;
};

// An operating system's thread, which runs one block after the other.
struct Worker {
  Launch* launch;
  pthread_t id;
  Thread* threads;
  char* stacks;
  Dim block, blocks, block_size;
  unsigned running, at_barrier;
  jmp_buf scheduler, stop;
};

// Neighbours of the shared memory: who fills that with rubbish sets them again.
static thread_local Worker* worker = nullptr;
static thread_local Thread* self = nullptr;
static thread_local Dim thread_index;

// Ends the launch: the first message of all workers counts.
[[noreturn]] static void fail(const char* format, ...) {
  Launch& launch = *worker->launch;
  if (!__atomic_exchange_n(&launch.failed, true, __ATOMIC_SEQ_CST)) {
    char* const text = launch.message;
    int length = snprintf(text, kMessageBytes, "block %u", worker->block.x);
    if (self != nullptr)
      length += snprintf(text + length, kMessageBytes - length, ", thread %u", self->index);
    length += snprintf(text + length, kMessageBytes - length, ": ");
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text + length, kMessageBytes - length, format, arguments);
    va_end(arguments);
  }
  _longjmp(worker->stop, 1);
}

// Back to the scheduler, until it is this fiber's turn again.
__attribute__((noinline)) static void suspend() {
  if (_setjmp(self->context) == 0) _longjmp(worker->scheduler, 1);
}

static void release_barrier() {
  if (worker->at_barrier == 0 || worker->at_barrier < worker->running) return;
  for (unsigned i = 0; i < worker->launch->threads; ++i)
    if (worker->threads[i].state == State::kAtBarrier) worker->threads[i].state = State::kReady;
  worker->at_barrier = 0;
}

static void run_fiber() {
  for (;;) {
    worker->launch->call(worker->launch->kernel, worker->launch->slots);
    self->state = State::kReturned;
    --worker->running;
    release_barrier();
    suspend();
  }
}

__attribute__((noinline)) static void resume(Thread& thread) {
  self = &thread;
  thread_index = {thread.index, 0, 0};
  if (_setjmp(worker->scheduler) == 0) {
    if (thread.started) _longjmp(thread.context, 1);
    thread.started = true;
    setcontext(&thread.start);
  }
  self = nullptr;
}

// Whether a lane waits in a primitive with this mask.
static bool has_come(const Thread& lane, Combine combine, unsigned mask) {
  return lane.state == State::kInWarp && lane.combine == combine && lane.mask == mask;
}

[[noreturn]] static void report_deadlock() {
  char text[kMessageBytes - 100];
  int length = 0;
  unsigned shown = 0, waiting = 0;
  const auto note = [&](const char* format, auto... values) {
    if (length < static_cast<int>(sizeof text))
      length += snprintf(text + length, sizeof text - length, format, values...);
  };
  for (unsigned i = 0; i < worker->launch->threads; ++i) {
    const Thread& thread = worker->threads[i];
    if (thread.state == State::kReturned) continue;
    ++waiting;
    if (++shown > 8) continue;
    note("\n  thread %u waits in ", i);
    if (thread.state == State::kAtBarrier) {
      note("__syncthreads()");
      continue;
    }
    unsigned returned = 0, beyond = 0, elsewhere = 0;
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      const unsigned index = i - thread.lane + lane, bit = thread.mask & 1u << lane;
      if (index >= worker->launch->threads)
        beyond |= bit;
      else if (worker->threads[index].state == State::kReturned)
        returned |= bit;
      else if (!has_come(worker->threads[index], thread.combine, thread.mask))
        elsewhere |= bit;
    }
    note("%s(0x%08x, …)", thread.primitive, thread.mask);
    if (returned != 0) note(", lanes 0x%08x have returned", returned);
    if (beyond != 0) note(", lanes 0x%08x are beyond the block", beyond);
    if (elsewhere != 0) note(", lanes 0x%08x are elsewhere", elsewhere);
  }
  fail("deadlock, %u of %u threads wait and no one can go on:%s%s", waiting,
       worker->launch->threads, text, shown < waiting ? "\n  …" : "");
}

// This thread's copy of the variables declared __shared__, which are thread-local here.
static int fill_shared(dl_phdr_info* info, size_t, void*) {
  const auto own = reinterpret_cast<uintptr_t>(&fill_shared);
  bool here = false;
  size_t bytes = 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& part = info->dlpi_phdr[i];
    if (part.p_type == PT_LOAD)
      here |= own - (info->dlpi_addr + part.p_vaddr) < part.p_memsz;
    else if (part.p_type == PT_TLS)
      bytes = part.p_memsz;
  }
  if (here && info->dlpi_tls_data != nullptr) memset(info->dlpi_tls_data, kRubbish, bytes);
  return here;
}

// Gives each lane that is ready a turn; whether there is one.
static bool run_warp(unsigned warp) {
  bool progress = false;
  for (unsigned i = 0; i < kWarp; ++i) {
    if (__atomic_load_n(&worker->launch->failed, __ATOMIC_SEQ_CST)) _longjmp(worker->stop, 1);
    const unsigned lane = worker->block.x % 2 == 0 ? i : kWarp - 1 - i;
    const unsigned index = warp * kWarp + lane;
    if (index >= worker->launch->threads || worker->threads[index].state != State::kReady) continue;
    progress = true;
    resume(worker->threads[index]);
  }
  return progress;
}

static void run_block(unsigned block) {
  Worker* const own = worker;
  const Launch& launch = *own->launch;
  dl_iterate_phdr(fill_shared, nullptr);
  worker = own;
  self = nullptr;
  own->block = {block, 0, 0};
  own->running = launch.threads;
  own->at_barrier = 0;
  for (unsigned i = 0; i < launch.threads; ++i) own->threads[i].state = State::kReady;
  const unsigned warps = (launch.threads + kWarp - 1) / kWarp;
  const unsigned first = block * 2654435761u % warps;
  while (own->running > 0) {
    bool progress = false;
    for (unsigned step = 0; step < warps; ++step) {
      const unsigned warp = (first + (block % 2 == 0 ? step : warps - 1 - step)) % warps;
      // As far ahead as it can get, but not for ever: it may wait for the next one in a loop.
      for (int turn = 0; turn < 100 && run_warp(warp); ++turn) progress = true;
    }
    if (!progress) report_deadlock();
  }
}

__attribute__((noinline)) static void run_blocks() {
  if (_setjmp(worker->stop) != 0) return;
  Launch& launch = *worker->launch;
  for (;;) {
    const unsigned block = __atomic_fetch_add(&launch.next_block, 1, __ATOMIC_SEQ_CST);
    if (block >= launch.blocks) return;
    run_block(block);
  }
}

static void* run_worker(void* argument) {
  worker = static_cast<Worker*>(argument);
  const Launch& launch = *worker->launch;
  worker->blocks = {launch.blocks, 1, 1};
  worker->block_size = {launch.threads, 1, 1};
  worker->threads = new Thread[launch.threads]();
  const size_t bytes = launch.threads * kStackBytes;
  worker->stacks = static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  for (unsigned i = 0; i < launch.threads; ++i) {
    Thread& thread = worker->threads[i];
    thread.index = i;
    thread.lane = i % kWarp;
    getcontext(&thread.start);
    thread.start.uc_stack.ss_sp = worker->stacks + i * kStackBytes;
    thread.start.uc_stack.ss_size = kStackBytes;
    makecontext(&thread.start, run_fiber, 0);
  }
  run_blocks();
  munmap(worker->stacks, bytes);
  delete[] worker->threads;
  worker = nullptr;
  return nullptr;
}

// Signals that end a worker's launch and not the process.
static const int kSignals[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGRTMIN};
static struct sigaction previous_actions[5];

static void on_signal(int signal, siginfo_t* info, void*) {
  if (worker == nullptr) {  // not ours
    for (int i = 0; i < 5; ++i)
      if (kSignals[i] == signal) sigaction(signal, &previous_actions[i], nullptr);
    return;
  }
  if (signal == kSignals[4]) fail("still running when the launch had to end");
  if (signal == SIGFPE) fail("division by zero");
  if (signal != SIGILL) fail("no memory at address %p", info->si_addr);
  Dl_info library;  // the compiler put an invalid instruction there
  dladdr(info->si_addr, &library);
  fail("undefined behaviour at offset 0x%zx",
       static_cast<char*>(info->si_addr) - static_cast<char*>(library.dli_fbase));
}

static bool joined_by(pthread_t id, double seconds) {
  timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  const int64_t nanoseconds = until.tv_nsec + static_cast<int64_t>(seconds * 1e9);
  until.tv_sec += nanoseconds / 1000000000;
  until.tv_nsec = nanoseconds % 1000000000;
  return pthread_timedjoin_np(id, nullptr, &until) == 0;
}

// Runs a launch, `num_workers` blocks at once.
static void run(Launch& launch, unsigned num_workers, double timeout) {
  struct sigaction action = {};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  for (int i = 0; i < 5; ++i) sigaction(kSignals[i], &action, &previous_actions[i]);
  auto* workers = new Worker[num_workers]();
  for (unsigned i = 0; i < num_workers; ++i) {
    workers[i].launch = &launch;
    pthread_create(&workers[i].id, nullptr, run_worker, &workers[i]);
  }
  for (unsigned i = 0; i < num_workers; ++i) {
    while (!joined_by(workers[i].id, 0.1)) {
      timeout -= 0.1;
      // Someone who waits in a loop for a block that failed never looks at `failed`.
      const bool failed = __atomic_load_n(&launch.failed, __ATOMIC_SEQ_CST);
      if (failed || timeout < 0) pthread_kill(workers[i].id, kSignals[4]);
    }
  }
  delete[] workers;
  for (int i = 0; i < 5; ++i) sigaction(kSignals[i], &previous_actions[i], nullptr);
}

template <typename Parameter>
Parameter argument(uint64_t slot) {
  static_assert(std::is_pointer_v<Parameter> || std::is_class_v<Parameter> ||
                    ((std::is_integral_v<Parameter> || std::is_same_v<Parameter, double>) &&
                     sizeof(Parameter) == 8),
                "a kernel's parameters are pointers, 64-bit integers, doubles and structs of them");
  Parameter value;
  if constexpr (std::is_class_v<Parameter>) {
    memcpy(&value, reinterpret_cast<const void*>(slot), sizeof value);
  } else {
    memcpy(&value, &slot, sizeof value);
  }
  return value;
}

template <typename... Parameters, size_t... Index>
void call(void (*kernel)(Parameters...), const uint64_t* slots, std::index_sequence<Index...>) {
  kernel(argument<Parameters>(slots[Index])...);
}

template <typename Parameter>
constexpr char kind_of() {
  if (std::is_class_v<Parameter>) return 's';
  return std::is_pointer_v<Parameter> ? 'p' : std::is_integral_v<Parameter> ? 'i' : 'd';
}

// A letter for each parameter (pointer, integer, double, struct) and its size: "p8 i8 s200 ".
template <typename... Parameters>
const char* parameters_of(void (*)(Parameters...)) {
  static char text[10 * sizeof...(Parameters) + 1];
  char* end = text;
  ((end += sprintf(end, "%c%zu ", kind_of<Parameters>(), sizeof(Parameters))), ...);
  return text;
}

template <typename... Parameters>
bool launch(void (*kernel)(Parameters...), const uint64_t* slots, int64_t blocks, int64_t threads,
            int64_t at_once, double timeout, char* message, int64_t bytes) {
  Launch all{};
  all.kernel = reinterpret_cast<void (*)()>(kernel);
  all.call = [](void (*untyped)(), const uint64_t* slots) {
    call(reinterpret_cast<void (*)(Parameters...)>(untyped), slots,
         std::index_sequence_for<Parameters...>());
  };
  all.slots = slots;
  all.blocks = blocks;
  all.threads = threads;
  run(all, at_once, timeout);
  snprintf(message, bytes, "%s", all.message);
  return !all.failed;
}

// ---- Warp primitives ----

template <typename T>
uint64_t bits_of(T value) {
  static_assert(std::is_arithmetic_v<T> && sizeof(T) <= 8);
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  return bits;
}

template <typename T>
T from_bits(uint64_t bits) {
  T value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// Waits for all lanes of the mask to come to the same primitive with the same mask.
static uint64_t meet(const char* primitive, Combine combine, unsigned mask, uint64_t value,
                     unsigned operand = 0, unsigned width = kWarp) {
  Thread& own = *self;
  if (!(mask >> own.lane & 1)) fail("%s with mask 0x%08x lacks the caller", primitive, mask);
  if (width == 0 || width > kWarp || (width & (width - 1)) != 0)
    fail("%s with width %u, no power of two up to 32", primitive, width);
  own.state = State::kInWarp;
  own.primitive = primitive;
  own.combine = combine;
  own.mask = mask;
  own.value = value;
  own.operand = operand;
  own.width = width;
  Thread* const warp = &own - own.lane;
  const unsigned lanes = worker->launch->threads - warp->index;
  bool complete = true;
  for (unsigned lane = 0; lane < kWarp && complete; ++lane)
    if (mask >> lane & 1)
      complete = lane < lanes && has_come(warp[lane], combine, mask);
  if (complete) {
    for (unsigned lane = 0; lane < kWarp; ++lane)
      if (mask >> lane & 1) warp[lane].result = combine(warp, warp[lane]);
    for (unsigned lane = 0; lane < kWarp; ++lane)
      if (mask >> lane & 1) warp[lane].state = State::kReady;
  } else {
    suspend();
  }
  return own.result;
}

// Value of a lane; rubbish if it takes no part.
inline uint64_t value_of(const Thread* warp, const Thread& own, unsigned lane) {
  return own.mask >> lane & 1 ? warp[lane].value : 0xCDCDCDCDCDCDCDCDu;
}

inline uint64_t no_value(const Thread*, const Thread&) { return 0; }

inline uint64_t shuffle_index(const Thread* warp, const Thread& own) {
  const unsigned inside = own.width - 1;
  return value_of(warp, own, (own.lane & ~inside) | (own.operand & inside));
}

inline uint64_t shuffle_up(const Thread* warp, const Thread& own) {
  const bool outside = (own.lane & (own.width - 1)) < own.operand;
  return outside ? own.value : value_of(warp, own, own.lane - own.operand);
}

inline uint64_t shuffle_down(const Thread* warp, const Thread& own) {
  const bool outside = (own.lane & (own.width - 1)) + uint64_t{own.operand} >= own.width;
  return outside ? own.value : value_of(warp, own, own.lane + own.operand);
}

inline uint64_t shuffle_xor(const Thread* warp, const Thread& own) {
  const unsigned source = own.lane ^ own.operand;
  const bool outside = source >= (own.lane & ~(own.width - 1)) + own.width;
  return outside ? own.value : value_of(warp, own, source);
}

inline uint64_t match_any(const Thread* warp, const Thread& own) {
  unsigned equal = 0;
  for (unsigned lane = 0; lane < kWarp; ++lane)
    if ((own.mask >> lane & 1) && warp[lane].value == own.value) equal |= 1u << lane;
  return equal;
}

inline uint64_t ballot(const Thread* warp, const Thread& own) {
  unsigned set = 0;
  for (unsigned lane = 0; lane < kWarp; ++lane)
    if ((own.mask >> lane & 1) && warp[lane].value != 0) set |= 1u << lane;
  return set;
}

inline uint64_t any(const Thread* warp, const Thread& own) { return ballot(warp, own) != 0; }

inline uint64_t all(const Thread* warp, const Thread& own) {
  return ballot(warp, own) == own.mask;
}

// Lets the other threads of the block run first.
static void give_way() { suspend(); }

// ---- Atomics ----

// Replaces *address by change(*address), gives what was there.
template <typename T, typename Change>
T update(T* address, Change change) {
  give_way();
  using Bits = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
  auto* place = reinterpret_cast<Bits*>(address);
  Bits before = __atomic_load_n(place, __ATOMIC_SEQ_CST);
  Bits after;
  do {
    const T changed = change(from_bits<T>(before));
    memcpy(&after, &changed, sizeof after);
  } while (!__atomic_compare_exchange_n(place, &before, after, false, __ATOMIC_SEQ_CST,
                                        __ATOMIC_SEQ_CST));
  return from_bits<T>(before);
}

// Keeps a rounded result from becoming part of a fused operation.
template <typename T>
T rounded(T value) {
  asm("" : "+m"(value));
  return value;
}

}  // namespace emulation

// ---- The language ----

#define __global__
#define __device__
#define __host__
#define __constant__
#define __shared__ static thread_local
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) alignas(bytes)

#define threadIdx (static_cast<const emulation::Dim&>(emulation::thread_index))
#define blockIdx (static_cast<const emulation::Dim&>(emulation::worker->block))
#define blockDim (static_cast<const emulation::Dim&>(emulation::worker->block_size))
#define gridDim (static_cast<const emulation::Dim&>(emulation::worker->blocks))
constexpr int warpSize = emulation::kWarp;

#define EMULATE_VECTOR(type, name, bytes1, bytes2, bytes4)                              \
  struct alignas(bytes2) name##2 { type x, y; };                                        \
  struct alignas(bytes4) name##4 { type x, y, z, w; };                                  \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; }                      \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
EMULATE_VECTOR(signed char, char, 1, 2, 4)
EMULATE_VECTOR(unsigned char, uchar, 1, 2, 4)
EMULATE_VECTOR(short, short, 2, 4, 8)
EMULATE_VECTOR(unsigned short, ushort, 2, 4, 8)
EMULATE_VECTOR(int, int, 4, 8, 16)
EMULATE_VECTOR(unsigned, uint, 4, 8, 16)
EMULATE_VECTOR(float, float, 4, 8, 16)
EMULATE_VECTOR(long long, longlong, 8, 16, 16)
EMULATE_VECTOR(unsigned long long, ulonglong, 8, 16, 16)
EMULATE_VECTOR(double, double, 8, 16, 16)
#undef EMULATE_VECTOR

inline void __syncthreads() {
  emulation::self->state = emulation::State::kAtBarrier;
  ++emulation::worker->at_barrier;
  emulation::release_barrier();
  if (emulation::self->state == emulation::State::kAtBarrier) emulation::suspend();
}

inline void __syncwarp(unsigned mask = emulation::kAllLanes) {
  emulation::meet("__syncwarp", emulation::no_value, mask, 0);
}

#define EMULATE_SHUFFLE(name, combine, type)                                                \
  template <typename T>                                                                     \
  T name(unsigned mask, T value, type operand, int width = emulation::kWarp) {              \
    return emulation::from_bits<T>(emulation::meet(#name, emulation::combine, mask,         \
                                                   emulation::bits_of(value), operand, width)); \
  }
EMULATE_SHUFFLE(__shfl_sync, shuffle_index, int)
EMULATE_SHUFFLE(__shfl_up_sync, shuffle_up, unsigned)
EMULATE_SHUFFLE(__shfl_down_sync, shuffle_down, unsigned)
EMULATE_SHUFFLE(__shfl_xor_sync, shuffle_xor, int)
#undef EMULATE_SHUFFLE

inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return emulation::meet("__ballot_sync", emulation::ballot, mask, predicate != 0);
}
inline int __any_sync(unsigned mask, int predicate) {
  return emulation::meet("__any_sync", emulation::any, mask, predicate != 0);
}
inline int __all_sync(unsigned mask, int predicate) {
  return emulation::meet("__all_sync", emulation::all, mask, predicate != 0);
}
template <typename T>
unsigned __match_any_sync(unsigned mask, T value) {
  return emulation::meet("__match_any_sync", emulation::match_any, mask,
                         emulation::bits_of(value));
}

inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __nanosleep(unsigned) {
  emulation::give_way();
  sched_yield();
}
inline long long clock64() {
  emulation::give_way();
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000ll + now.tv_nsec;
}
[[noreturn]] inline void __trap() { emulation::fail("__trap()"); }

#define EMULATE_ATOMIC(name, type, expression)                                  \
  inline type name(type* address, type value) {                                 \
    return emulation::update(address, [=](type old) -> type { return expression; }); \
  }
#define EMULATE_ATOMIC_INTEGERS(name, expression)          \
  EMULATE_ATOMIC(name, int, expression)                    \
  EMULATE_ATOMIC(name, unsigned, expression)               \
  EMULATE_ATOMIC(name, unsigned long long, expression)
EMULATE_ATOMIC(atomicAdd, int, static_cast<int>(static_cast<unsigned>(old) + value))
EMULATE_ATOMIC(atomicAdd, unsigned, old + value)
EMULATE_ATOMIC(atomicAdd, unsigned long long, old + value)
EMULATE_ATOMIC(atomicAdd, float, old + value)
EMULATE_ATOMIC(atomicAdd, double, old + value)
EMULATE_ATOMIC(atomicSub, int, static_cast<int>(static_cast<unsigned>(old) - value))
EMULATE_ATOMIC(atomicSub, unsigned, old - value)
EMULATE_ATOMIC_INTEGERS(atomicMin, old < value ? old : value)
EMULATE_ATOMIC(atomicMin, long long, old < value ? old : value)
EMULATE_ATOMIC_INTEGERS(atomicMax, old > value ? old : value)
EMULATE_ATOMIC(atomicMax, long long, old > value ? old : value)
EMULATE_ATOMIC_INTEGERS(atomicExch, value)
EMULATE_ATOMIC(atomicExch, float, value)
EMULATE_ATOMIC_INTEGERS(atomicOr, old | value)
EMULATE_ATOMIC_INTEGERS(atomicAnd, old & value)
EMULATE_ATOMIC_INTEGERS(atomicXor, old ^ value)
#undef EMULATE_ATOMIC_INTEGERS
#undef EMULATE_ATOMIC

#define EMULATE_CAS(type)                                                       \
  inline type atomicCAS(type* address, type expected, type value) {             \
    return emulation::update(                                                   \
        address, [=](type old) -> type { return old == expected ? value : old; }); \
  }
EMULATE_CAS(int)
EMULATE_CAS(unsigned)
EMULATE_CAS(unsigned long long)
#undef EMULATE_CAS

#define EMULATE_LOAD(name) \
  template <typename T>    \
  T name(const T* address) { return *address; }
EMULATE_LOAD(__ldg)
EMULATE_LOAD(__ldcg)
EMULATE_LOAD(__ldcs)
#undef EMULATE_LOAD

#define EMULATE_STORE(name)            \
  template <typename T>                \
  void name(T* address, T value) { *address = value; }
EMULATE_STORE(__stcg)
EMULATE_STORE(__stcs)
#undef EMULATE_STORE

inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __popcll(unsigned long long value) { return __builtin_popcountll(value); }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline int __ffsll(long long value) { return __builtin_ffsll(value); }
inline int __clz(int value) { return value == 0 ? 32 : __builtin_clz(value); }
inline int __clzll(long long value) { return value == 0 ? 64 : __builtin_clzll(value); }
inline unsigned __umulhi(unsigned a, unsigned b) { return uint64_t{a} * b >> 32; }
inline int __mulhi(int a, int b) { return int64_t{a} * b >> 32; }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned __int128>(a) * b >> 64;
}
inline long long __mul64hi(long long a, long long b) {
  return static_cast<__int128>(a) * b >> 64;
}

inline double __dmul_rn(double a, double b) { return emulation::rounded(a * b); }
inline double __dadd_rn(double a, double b) { return emulation::rounded(a) + b; }
inline double __dsub_rn(double a, double b) { return emulation::rounded(a) - b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __dsqrt_rn(double a) { return __builtin_sqrt(a); }
inline double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return emulation::rounded(a * b); }
inline float __fadd_rn(float a, float b) { return emulation::rounded(a) + b; }
inline float __fsub_rn(float a, float b) { return emulation::rounded(a) - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double __ll2double_rn(long long value) { return value; }
inline double __ull2double_rn(unsigned long long value) { return value; }
inline long long __double_as_longlong(double value) {
  return emulation::from_bits<long long>(emulation::bits_of(value));
}
inline double __longlong_as_double(long long value) {
  return emulation::from_bits<double>(emulation::bits_of(value));
}
inline int __float_as_int(float value) {
  return emulation::from_bits<int>(emulation::bits_of(value));
}
inline unsigned __float_as_uint(float value) {
  return emulation::from_bits<unsigned>(emulation::bits_of(value));
}
inline float __int_as_float(int value) {
  return emulation::from_bits<float>(emulation::bits_of(value));
}
inline float __uint_as_float(unsigned value) {
  return emulation::from_bits<float>(emulation::bits_of(value));
}

// CUDA's overloads, no more: what is ambiguous there is ambiguous here.
#define EMULATE_MIN_MAX(type, left, right)                                    \
  inline type min(left a, right b) {                                          \
    const type first = a, second = b;                                         \
    return first < second ? first : second;                                   \
  }                                                                           \
  inline type max(left a, right b) {                                          \
    const type first = a, second = b;                                         \
    return first > second ? first : second;                                   \
  }
EMULATE_MIN_MAX(int, int, int)
EMULATE_MIN_MAX(unsigned, unsigned, unsigned)
EMULATE_MIN_MAX(unsigned, int, unsigned)
EMULATE_MIN_MAX(unsigned, unsigned, int)
EMULATE_MIN_MAX(long, long, long)
EMULATE_MIN_MAX(unsigned long, unsigned long, unsigned long)
EMULATE_MIN_MAX(long long, long long, long long)
EMULATE_MIN_MAX(unsigned long long, unsigned long long, unsigned long long)
EMULATE_MIN_MAX(unsigned long long, long long, unsigned long long)
EMULATE_MIN_MAX(unsigned long long, unsigned long long, long long)
EMULATE_MIN_MAX(float, float, float)
EMULATE_MIN_MAX(double, double, double)
EMULATE_MIN_MAX(double, float, double)
EMULATE_MIN_MAX(double, double, float)
#undef EMULATE_MIN_MAX

// What Python calls; `...` is the kernel, whose name may contain commas.
#define EMULATE_KERNEL(...)                                                                  \
  extern "C" __attribute__((visibility("default"))) const char* emulated_parameters() {     \
    return emulation::parameters_of(__VA_ARGS__);                                            \
  }                                                                                          \
  extern "C" __attribute__((visibility("default"))) bool emulated_launch(                    \
      const uint64_t* slots, int64_t blocks, int64_t threads, int64_t at_once,               \
      double timeout, char* message, int64_t message_bytes) {                                \
    return emulation::launch(__VA_ARGS__, slots, blocks, threads, at_once, timeout, message, \
                             message_bytes);                                                 \
  }
