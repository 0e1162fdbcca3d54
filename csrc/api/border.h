// What stands at the border: statuses of exceptions, a text of the last error, structs by size.
#pragma once

#include <cstring>
#include <new>
#include <string>
#include <type_traits>
#include <utility>

#include "regatta.h"
#include "regatta/types.h"

namespace regatta::api {

struct Failure {
  regatta_status status;
  std::string message;
};

inline void require(bool holds, const char* message) {
  if (!holds) throw Failure{REGATTA_INVALID, message};
}

// An error of what is below, as that status.
inline void check(const Status& status, regatta_status of) {
  if (!status.ok()) throw Failure{of, status.message()};
}

// What the calling thread's regatta_error() says.
regatta_status failed(regatta_status status, const char* message) noexcept;

// REGATTA_OK, and every exception of `call` as a status.
template <class Call>
regatta_status guarded(Call call) noexcept {
  try {
    call();
    return REGATTA_OK;
  } catch (const Failure& failure) {
    return failed(failure.status, failure.message.c_str());
  } catch (const std::bad_alloc&) {
    return failed(REGATTA_NO_MEMORY, "there is not enough memory");
  } catch (const std::exception& error) {
    return failed(REGATTA_FAILED, error.what());
  } catch (...) {
    return failed(REGATTA_FAILED, "an exception of an unknown type");
  }
}

inline std::string sizes_string(const char* name, size_t size, size_t least, const char* why) {
  return std::string(name) + ".struct_size is " + std::to_string(size) +
         " (allowed: " + std::to_string(least) + " and more, by eights): " + why;
}

// A struct of a caller's header takes what is known here, and leaves the rest as `defaults` has it.
// A newer caller's fields are refused unless they are 0. Every field has 8 bytes, so that a shorter
// struct ends with a whole one.
template <class T>
T taken(const T* given, const T& defaults, const char* name) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % 8 == 0);
  const size_t size = given->struct_size;
  if (size < sizeof(size_t) || size % 8 != 0 || size > 1 << 16) {
    throw Failure{REGATTA_INVALID,
                  sizes_string(name, size, sizeof(size_t), "make it with its _init function")};
  }
  T made = defaults;
  std::memcpy(&made, given, size < sizeof(T) ? size : sizeof(T));
  made.struct_size = sizeof(T);
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  for (size_t i = sizeof(T); i < size; ++i) {
    if (bytes[i] != 0) {
      throw Failure{REGATTA_UNSUPPORTED, std::string(name) + " has a field at byte " +
                                             std::to_string(i) +
                                             " that this library does not know (version " +
                                             std::to_string(REGATTA_VERSION) + "); set it to 0"};
    }
  }
  return made;
}

// Writes as much as the caller's struct holds, and zeros behind what is known here.
template <class T>
void give(T made, T* to, size_t size, const char* name) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % 8 == 0);
  if (size < sizeof(size_t) || size % 8 != 0 || size > 1 << 16) {
    throw Failure{REGATTA_INVALID,
                  sizes_string(name, size, sizeof(size_t), "sizeof of the struct")};
  }
  made.struct_size = size;
  std::memset(static_cast<void*>(to), 0, size);
  std::memcpy(static_cast<void*>(to), &made, size < sizeof(T) ? size : sizeof(T));
}

}  // namespace regatta::api
