// A Paddle custom device of host memory, for tests: device type "pretend", two devices.
//
// Its memory is mapped twice. The addresses that Paddle gets can be neither read nor written; only
// the copies in here go through the other mapping. So an operator that took a tensor of this device
// for one of the CPU would die of it. There are no kernels: Paddle's CPU kernels run, on copies.
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <mutex>

#include "paddle/phi/backends/device_ext.h"

namespace {

constexpr char kDeviceType[] = "pretend";
constexpr size_t kNumDevices = 2, kTotalBytes = size_t{4} << 30;

struct Block {
  char* own;  // where it can be read and written
  size_t size;
};

std::mutex mutex;
std::map<char*, Block> blocks;  // by the address that Paddle has
size_t allocated = 0;
int current = 0;

// Where the byte at `address` can be read and written; that address itself for the host's.
char* readable(const void* address) {
  auto* const at = static_cast<char*>(const_cast<void*>(address));
  const std::lock_guard<std::mutex> lock(mutex);
  auto next = blocks.upper_bound(at);
  if (next == blocks.begin()) return at;
  const auto& [start, block] = *--next;
  return at < start + block.size ? block.own + (at - start) : at;
}

C_Status allocate(const C_Device, void** pointer, size_t size) {
  *pointer = nullptr;  // with success: out of memory
  const std::lock_guard<std::mutex> lock(mutex);
  if (allocated + size > kTotalBytes) return C_SUCCESS;
  const int file = memfd_create(kDeviceType, MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(size)) != 0) return C_FAILED;
  void* const own = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  void* const given = mmap(nullptr, size, PROT_NONE, MAP_SHARED, file, 0);
  close(file);
  if (own == MAP_FAILED || given == MAP_FAILED) return C_FAILED;
  blocks[static_cast<char*>(given)] = {static_cast<char*>(own), size};
  allocated += size;
  *pointer = given;
  return C_SUCCESS;
}

C_Status deallocate(const C_Device, void* pointer, size_t) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = blocks.find(static_cast<char*>(pointer));
  if (found == blocks.end()) return C_FAILED;
  munmap(found->second.own, found->second.size);
  munmap(pointer, found->second.size);
  allocated -= found->second.size;
  blocks.erase(found);
  return C_SUCCESS;
}

C_Status allocate_host(const C_Device, void** pointer, size_t size) {
  *pointer = ::operator new(size);
  return C_SUCCESS;
}

C_Status deallocate_host(const C_Device, void* pointer, size_t) {
  ::operator delete(pointer);
  return C_SUCCESS;
}

C_Status set_memory(const C_Device, void* pointer, unsigned char value, size_t size) {
  std::memset(readable(pointer), value, size);
  return C_SUCCESS;
}

C_Status copy(const C_Device, void* to, const void* from, size_t size) {
  std::memmove(readable(to), readable(from), size);
  return C_SUCCESS;
}

C_Status copy_on_stream(const C_Device device, C_Stream, void* to, const void* from, size_t size) {
  return copy(device, to, from, size);
}

C_Status copy_to_peer(const C_Device to_device, const C_Device, void* to, const void* from,
                      size_t size) {
  return copy(to_device, to, from, size);
}

C_Status copy_to_peer_on_stream(const C_Device to_device, const C_Device, C_Stream, void* to,
                                const void* from, size_t size) {
  return copy(to_device, to, from, size);
}

C_Status memory_stats(const C_Device, size_t* total, size_t* free) {
  const std::lock_guard<std::mutex> lock(mutex);
  *total = kTotalBytes, *free = kTotalBytes - allocated;
  return C_SUCCESS;
}

C_Status min_chunk_size(const C_Device, size_t* size) {
  *size = 64;
  return C_SUCCESS;
}

// All work is over when a call returns, so streams and events have nothing to say.

C_Status get_device_count(size_t* count) {
  *count = kNumDevices;
  return C_SUCCESS;
}

C_Status get_device_list(size_t* devices) {
  for (size_t i = 0; i < kNumDevices; ++i) devices[i] = i;
  return C_SUCCESS;
}

C_Status set_device(const C_Device device) {
  current = device->id;
  return C_SUCCESS;
}

C_Status get_device(const C_Device device) {
  device->id = current;
  return C_SUCCESS;
}

int placeholder;

template <class Handle>
Handle some() {
  return reinterpret_cast<Handle>(&placeholder);
}

C_Status create_stream(const C_Device, C_Stream* stream) {
  *stream = some<C_Stream>();
  return C_SUCCESS;
}

C_Status create_event(const C_Device, C_Event* event) {
  *event = some<C_Event>();
  return C_SUCCESS;
}

C_Status add_callback(const C_Device device, C_Stream stream, C_Callback function, void* data) {
  C_Status status = C_SUCCESS;
  function(device, stream, data, &status);
  return status;
}

C_Status succeed() { return C_SUCCESS; }
C_Status succeed_for(const C_Device) { return C_SUCCESS; }
C_Status succeed_stream(const C_Device, C_Stream) { return C_SUCCESS; }
C_Status succeed_event(const C_Device, C_Event) { return C_SUCCESS; }
C_Status succeed_both(const C_Device, C_Stream, C_Event) { return C_SUCCESS; }

C_Status init_blas(const C_Device, C_BLASHandle* handle, C_Stream) {
  *handle = some<C_BLASHandle>();
  return C_SUCCESS;
}

C_Status init_blaslt(const C_Device, C_BLASLtHandle* handle) {
  *handle = some<C_BLASLtHandle>();
  return C_SUCCESS;
}

C_Status destroy_blas(const C_Device, C_BLASHandle) { return C_SUCCESS; }
C_Status destroy_blaslt(const C_Device, C_BLASLtHandle) { return C_SUCCESS; }

}  // namespace

extern "C" __attribute__((visibility("default"))) void InitPlugin(CustomRuntimeParams* params) {
  PADDLE_CUSTOM_RUNTIME_CHECK_VERSION(params);
  params->device_type = const_cast<char*>(kDeviceType);
  params->sub_device_type = const_cast<char*>("");
  C_DeviceInterface* const table = params->interface;
  std::memset(static_cast<void*>(table), 0, sizeof(*table));
  table->size = sizeof(*table);
  table->initialize = table->finalize = succeed;
  table->init_device = table->deinit_device = table->synchronize_device = succeed_for;
  table->set_device = set_device;
  table->get_device = get_device;
  table->get_device_count = get_device_count;
  table->get_device_list = get_device_list;
  table->create_stream = create_stream;
  table->destroy_stream = table->query_stream = table->synchronize_stream = succeed_stream;
  table->stream_add_callback = add_callback;
  table->stream_wait_event = table->record_event = succeed_both;
  table->create_event = create_event;
  table->destroy_event = table->query_event = table->synchronize_event = succeed_event;
  table->device_memory_allocate = allocate;
  table->device_memory_deallocate = deallocate;
  table->device_memory_set = set_memory;
  table->host_memory_allocate = allocate_host;
  table->host_memory_deallocate = deallocate_host;
  table->memory_copy_h2d = table->memory_copy_d2h = table->memory_copy_d2d = copy;
  table->memory_copy_p2p = copy_to_peer;
  table->async_memory_copy_h2d = table->async_memory_copy_d2h = copy_on_stream;
  table->async_memory_copy_d2d = copy_on_stream;
  table->async_memory_copy_p2p = copy_to_peer_on_stream;
  table->device_memory_stats = memory_stats;
  table->device_min_chunk_size = min_chunk_size;
  table->init_blas_handle = init_blas;
  table->init_blaslt_handle = init_blaslt;
  table->destroy_blas_handle = destroy_blas;
  table->destroy_blaslt_handle = destroy_blaslt;
}
