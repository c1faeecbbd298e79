// Addresses for the tensors of a step that runs no kernels; each address is used once.
//
// A page takes no memory until it is written to, so tensors may be larger than the machine. As
// addresses are unique, a pointer in the parameters of a launch identifies its tensor.
//
// Behind an int, or a float below 2, padding may still hold the upper half of a pointer. The 8
// bytes must not look like the address of a tensor: tensors of at most 3 GiB avoid the first 1 GiB
// of each 4 GiB.

#undef TORCH_TARGET_VERSION  // allocators are not a part of torch's stable ABI
#include <c10/core/Allocator.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <stdexcept>

namespace {

constexpr size_t kReservedBytes = size_t(1) << 42;
constexpr size_t kAlignment = 512;  // as in torch's allocator on a GPU
constexpr size_t kUnused = size_t(1) << 30, kPeriod = size_t(1) << 32;

class Addresses final : public c10::Allocator {
 public:
  Addresses() {
    void* memory = mmap(nullptr, kReservedBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::runtime_error("no addresses for tensors without memory");
    next_ = static_cast<char*>(memory);
    end_ = next_ + kReservedBytes;
  }

  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, cpu};
    const std::lock_guard<std::mutex> lock(mutex_);
    const size_t at = reinterpret_cast<uintptr_t>(next_) % kPeriod;
    if (at < kUnused) next_ += kUnused - at;
    if (at + bytes > kPeriod && bytes <= kPeriod - kUnused) next_ += kPeriod - at + kUnused;
    if (end_ < next_ || bytes > size_t(end_ - next_))
      throw std::runtime_error("no addresses left for a tensor");
    char* memory = next_;
    next_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    bytes_of_[memory] = bytes;
    used_ += bytes;
    peak_ = std::max(peak_, used_);
    return {memory, memory, &Addresses::free, cpu};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  // Finds the tensor that holds an address, and returns whether there is one.
  bool find(const char* address, const char** begin, const char** end) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto found = bytes_of_.upper_bound(address);
    if (found == bytes_of_.begin()) return false;
    --found;
    *begin = found->first;
    *end = found->first + found->second;
    return address < *end;
  }

  // Returns the most bytes of tensors that were alive at a time since the last call, beyond those
  // that were alive then.
  size_t peak_since_last_call() {
    const std::lock_guard<std::mutex> lock(mutex_);
    const size_t found = peak_ - used_at_last_call_;
    peak_ = used_at_last_call_ = used_;
    return found;
  }

 private:
  static void free(void* memory);

  std::mutex mutex_;
  size_t used_ = 0, peak_ = 0, used_at_last_call_ = 0;  // bytes of tensors that are alive
  char *next_, *end_;
  std::map<const char*, size_t> bytes_of_;
};

Addresses& addresses() {
  static Addresses& instance = *new Addresses();  // tensors may outlive static objects
  return instance;
}

// The address is not used again.
void Addresses::free(void* memory) {
  const std::lock_guard<std::mutex> lock(addresses().mutex_);
  addresses().used_ -= addresses().bytes_of_.at(static_cast<char*>(memory));
}

}  // namespace

// Chooses whether new CPU tensors get addresses without memory.
extern "C" __attribute__((visibility("default"))) void cuda_on_host_reserve(bool reserves) {
  static c10::Allocator* const usual = c10::GetAllocator(c10::DeviceType::CPU);
  c10::SetAllocator(c10::DeviceType::CPU, reserves ? &addresses() : usual);
}

extern "C" __attribute__((visibility("default"))) bool cuda_on_host_tensor_at(const char* address,
                                                                              const char** begin,
                                                                              const char** end) {
  return addresses().find(address, begin, end);
}

extern "C" __attribute__((visibility("default"))) size_t cuda_on_host_peak_bytes() {
  return addresses().peak_since_last_call();
}
