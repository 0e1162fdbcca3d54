// A callable of the caller's, passed on by reference: valid while the call lasts that it is for.
// What a caller does to each tile or row is one of these, so that what makes tiles and rows is
// compiled once and not for each caller.
#pragma once

#include <type_traits>

namespace regatta::cpu {

template <class Signature>
class FunctionRef;

template <class Result, class... Arguments>
class FunctionRef<Result(Arguments...)> {
 public:
  template <class Fn,
            class = std::enable_if_t<!std::is_same_v<std::remove_cv_t<std::remove_reference_t<Fn>>,
                                                     FunctionRef>>>
  FunctionRef(Fn&& fn)  // NOLINT: converts
      : callable_(const_cast<void*>(static_cast<const void*>(&fn))),
        call_([](void* callable, Arguments... arguments) -> Result {
          return (*static_cast<std::remove_reference_t<Fn>*>(callable))(arguments...);
        }) {}

  Result operator()(Arguments... arguments) const { return call_(callable_, arguments...); }

 private:
  void* callable_;
  Result (*call_)(void* callable, Arguments... arguments);
};

}  // namespace regatta::cpu
