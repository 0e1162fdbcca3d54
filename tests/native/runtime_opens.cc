// Opens folders, and runs a few steps of what opens: a line of the standard input is a path. Prints
// the status, the finish of a request, and what was said.
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <regatta.hpp>

namespace {

regatta_status open(const std::string& folder, regatta_engine** engine) {
  regatta::Options options;
  options.memory_limit = int64_t{1} << 30;
  options.num_blocks = 4;
  options.num_threads = 1;
  return regatta_open(folder.c_str(), &options, engine);
}

struct Heard {
  int64_t finish = 0;
  std::string error;

  static void add(void* user, const regatta_event* event) {
    auto* const heard = static_cast<Heard*>(user);
    if (heard->finish != 0) std::abort();
    heard->finish = event->finish;
    if (event->error != nullptr) heard->error = event->error;
  }
};

}  // namespace

int main() {
  for (std::string folder; std::getline(std::cin, folder);) {
    regatta_engine* engine = nullptr;
    Heard heard;
    regatta_status status = open(folder, &engine);
    if ((status == REGATTA_OK) != (engine != nullptr)) std::abort();
    if (status == REGATTA_OK) {
      const int32_t ids[] = {1, 5, 9, 7};
      regatta_request request;
      regatta::check(regatta_request_init(engine, &request, sizeof request));
      request.prompt_ids = {ids, 4};
      request.max_new_tokens = 3;
      request.callback = Heard::add, request.user = &heard;
      status = regatta_submit(engine, &request, nullptr);
      int64_t ran = 1;
      while (status == REGATTA_OK && ran != 0) status = regatta_step(engine, &ran);
    }
    if (status != REGATTA_OK && regatta_error()[0] == 0) std::abort();
    regatta::check(regatta_close(engine));
    const std::string said = status == REGATTA_OK ? heard.error : regatta_error();
    std::cout << int(status) << ' ' << heard.finish << ' ' << said << std::endl;
  }
}
