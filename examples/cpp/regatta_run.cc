// Answers prompts: regatta-run FOLDER --prompt TEXT. `regatta-run --help` lists the rest.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <regatta.hpp>
#include <sstream>
#include <string>
#include <vector>
#ifdef WITH_TEXT
#include <regatta_with_text.h>

#include <regatta_text.hpp>
#endif

namespace {

using Json = nlohmann::json;
using Clock = std::chrono::steady_clock;

constexpr char kUsage[] = R"(usage: regatta-run FOLDER [what to answer] [how]

  --prompt TEXT         answers a text
  --ids "ID ID ..."     answers token ids, with ids
  --data_file FILE      answers lines of JSON: {"src": TEXT}, {"prompt": TEXT} or {"ids": [ID, ...]};
                        - is the standard input. The answers are lines of JSON, in the same order
  --bench IN,OUT        measures OUT tokens behind IN tokens that mean nothing, --batch_size times
  --verify              compares every file with its digest first
  --memory              prints what opening takes, in bytes, and opens nothing

  --stream              prints text as it comes
  --batch_size N        requests in a step (8)
  --max_new_tokens N    (64)
  --temperature T, --top_k K, --top_p P, --min_p P, --repetition_penalty R, --seed S
                        as the folder recommends; --temperature 0 is greedy
  --stop TEXT           ends the answer; may be given more than once
  --logprobs N          prints how likely tokens and N others were, with lines of JSON
  --ignore_eos          runs on behind the end of the text
  --num_threads N, --num_blocks N, --memory_limit BYTES, --max_num_batched_tokens N, --max_length N
)";

struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Arguments {
  std::string folder;
  std::map<std::string, std::string> values;
  std::vector<std::string> stop;

  bool has(const std::string& name) const { return values.count(name) > 0; }
  template <class T>
  T number(const std::string& name, T otherwise) const {
    if (!has(name)) return otherwise;
    std::istringstream text(values.at(name));
    T value;
    if (!(text >> value) || !text.eof()) {
      throw UsageError(name + " is '" + values.at(name) + "' (allowed: a number)");
    }
    return value;
  }
};

Arguments parse(int argc, char** argv) {
  const std::map<std::string, bool> known = {
      {"--prompt", true},       {"--ids", true},        {"--data_file", true},
      {"--bench", true},        {"--verify", false},    {"--memory", false},
      {"--stream", false},      {"--batch_size", true}, {"--max_new_tokens", true},
      {"--temperature", true},  {"--top_k", true},      {"--top_p", true},
      {"--min_p", true},        {"--seed", true},       {"--repetition_penalty", true},
      {"--stop", true},         {"--logprobs", true},   {"--ignore_eos", false},
      {"--num_threads", true},  {"--num_blocks", true}, {"--max_num_batched_tokens", true},
      {"--memory_limit", true}, {"--max_length", true},
  };
  Arguments made;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word.rfind("--", 0) != 0) {
      if (!made.folder.empty()) throw UsageError("there are two folders: " + word);
      made.folder = word;
      continue;
    }
    const auto found = known.find(word);
    if (found == known.end()) throw UsageError(word + " is not known");
    if (found->second && i + 1 == argc) throw UsageError(word + " needs a value");
    const std::string value = found->second ? argv[++i] : "";
    if (word == "--stop") {
      made.stop.push_back(value);
    } else {
      made.values[word] = value;
    }
  }
  if (made.folder.empty()) throw UsageError("a folder is missing");
  return made;
}

regatta::Options options_of(const Arguments& arguments) {
  regatta::Options options;
  options.batch_size = arguments.number("--batch_size", options.batch_size);
  options.num_threads = arguments.number("--num_threads", options.num_threads);
  options.num_blocks = arguments.number("--num_blocks", options.num_blocks);
  options.memory_limit = arguments.number("--memory_limit", options.memory_limit);
  options.max_length = arguments.number("--max_length", options.max_length);
  options.max_num_batched_tokens =
      arguments.number("--max_num_batched_tokens", options.max_num_batched_tokens);
  options.verify = arguments.has("--verify");
  options.log = [](void*, regatta_log_level, const char* text) {
    std::fprintf(stderr, "%s\n", text);
  };
  return options;
}

void set_sampling(const Arguments& arguments, regatta::Request* request) {
  regatta_request& fields = request->fields;
  fields.max_new_tokens = arguments.number<int64_t>("--max_new_tokens", 64);
  fields.temperature = arguments.number("--temperature", fields.temperature);
  fields.top_k = arguments.number("--top_k", fields.top_k);
  fields.top_p = arguments.number("--top_p", fields.top_p);
  fields.min_p = arguments.number("--min_p", fields.min_p);
  fields.repetition_penalty = arguments.number("--repetition_penalty", fields.repetition_penalty);
  fields.has_seed = arguments.has("--seed");
  fields.seed = arguments.number<int64_t>("--seed", 0);
  fields.num_logprobs = arguments.number<int64_t>("--logprobs", -1);
  fields.ignore_eos = arguments.has("--ignore_eos");
  request->stop = arguments.stop;
}

const char* finish_name(int64_t finish) {
  constexpr const char* kNames[] = {"unfinished", "stop", "length", "cancelled", "error"};
  return finish >= 0 && finish <= REGATTA_ERROR ? kNames[finish] : "unknown";
}

// What came of one request so far.
struct Answer {
  std::vector<int32_t> ids;
  std::string text, error;
  Json logprobs = Json::array();
  int64_t finish = REGATTA_UNFINISHED;

  void add(const regatta::Event& event) {
    ids.insert(ids.end(), event.ids, event.ids + event.num_ids);
    text += event.new_text();
    if (event.error != nullptr) error = event.error;
    finish = event.finish;
    for (int64_t i = 0; event.logprobs != nullptr && i < event.num_ids; ++i) {
      Json likeliest = Json::array();
      for (int64_t k = 0; k < event.num_likeliest; ++k) {
        const int64_t at = i * event.num_likeliest + k;
        likeliest.push_back({event.likeliest_ids[at], event.likeliest_logprobs[at]});
      }
      logprobs.push_back({{"id", event.ids[i]},
                          {"logprob", event.logprobs[i]},
                          {"rank", event.ranks[i]},
                          {"likeliest", likeliest}});
    }
  }

  Json json(bool has_text) const {
    Json made = {{"ids", ids}, {"finish", finish_name(finish)}};
    if (has_text) made["text"] = text;
    if (!logprobs.empty()) made["logprobs"] = logprobs;
    if (!error.empty()) made["error"] = error;
    return made;
  }
};

class Run {
 public:
  Run(const Arguments& arguments, const regatta::Options& options)
      : arguments_(arguments), engine_(arguments.folder, options) {}

  // One prompt, its text or its ids to the standard output.
  int one(const regatta::Request& request, bool has_text) {
    const bool streams = arguments_.has("--stream");
    answers_.resize(1);
    const Answer& answer = answers_[0];
    engine_.submit(request, [this, has_text, streams](const regatta::Event& event) {
      answers_[0].add(event);
      if (has_text && streams) std::cout << event.new_text() << std::flush;
    });
    finish();
    if (!answer.error.empty()) throw std::runtime_error(answer.error);
    if (!has_text) {
      for (const int32_t id : answer.ids) std::cout << id << ' ';
    } else if (!streams) {
      std::cout << answer.text;
    }
    std::cout << std::endl;
    if (!answer.logprobs.empty()) std::cout << answer.logprobs << std::endl;
    return 0;
  }

  // A line of JSON for each line; those ahead of a slow one wait for nobody behind it.
  int lines(std::istream& in, bool has_text) {
    size_t num_printed = 0;
    const auto print_whole = [&] {
      while (num_printed < answers_.size() && answers_[num_printed].finish != REGATTA_UNFINISHED) {
        std::cout << answers_[num_printed].json(has_text).dump(-1, ' ', false,
                                                               Json::error_handler_t::replace)
                  << std::endl;
        answers_[num_printed++].ids.clear();
      }
    };
    std::vector<regatta::Request> requests;
    for (std::string line; std::getline(in, line);) {
      if (!line.empty()) requests.push_back(request_of(line, requests.size() + 1));
    }
    answers_.resize(requests.size());
    for (size_t i = 0; i < requests.size(); ++i) {
      engine_.submit(requests[i],
                     [this, i](const regatta::Event& event) { answers_[i].add(event); });
    }
    while (engine_.step()) print_whole();
    print_whole();
    return 0;
  }

  // Times of --batch_size requests that begin together, behind as many that warm up.
  int bench(int64_t num_in, int64_t num_out) {
    const auto num = static_cast<double>(arguments_.number<int64_t>("--batch_size", 8));
    const auto in = static_cast<double>(num_in), steps = static_cast<double>(num_out - 1);
    measure(num_in, num_out);
    const Times took = measure(num_in, num_out);
    std::printf("%.0f x %.0f tokens of prompts: %.2f ms, %.1f tokens/s\n", num, in,
                took.prompts * 1e3, num * in / took.prompts);
    if (num_out > 1) {
      std::printf("%.0f x %.0f new tokens: %.3f ms a step, %.1f tokens/s\n", num, steps,
                  took.decoding * 1e3 / steps, num * steps / took.decoding);
    }
    return 0;
  }

  regatta::Request request() const {
    regatta::Request made(engine_);
    set_sampling(arguments_, &made);
    return made;
  }

 private:
  struct Times {
    double prompts, decoding;  // seconds
  };

  // Requests of ids that mean nothing, which differ from those of earlier calls.
  Times measure(int64_t num_in, int64_t num_out) {
    const int64_t batch_size = arguments_.number<int64_t>("--batch_size", 8);
    const int64_t vocab_size = engine_.info().vocab_size;
    first_.assign(batch_size, {}), last_.assign(batch_size, {});
    const Clock::time_point began = Clock::now();
    for (int64_t i = 0; i < batch_size; ++i) {
      regatta::Request given = request();
      given.fields.temperature = arguments_.number("--temperature", 0.0);
      given.fields.max_new_tokens = num_out;
      given.fields.ignore_eos = 1;
      for (int64_t k = 0; k < num_in; ++k) {
        dice_ = dice_ * 1664525u + 1013904223u;
        given.prompt_ids.push_back(static_cast<int32_t>(dice_ / 256 % vocab_size));
      }
      engine_.submit(given, [this, i](const regatta::Event& event) {
        if (event.error != nullptr) throw std::runtime_error(event.error);
        last_[i] = Clock::now();
        if (first_[i] == Clock::time_point()) first_[i] = last_[i];
      });
    }
    finish();
    const auto latest = [](const std::vector<Clock::time_point>& times) {
      return *std::max_element(times.begin(), times.end());
    };
    const auto seconds = [](Clock::duration took) {
      return std::chrono::duration<double>(took).count();
    };
    return {seconds(latest(first_) - began), seconds(latest(last_) - latest(first_))};
  }

  void finish() {
    while (engine_.step()) {
    }
  }

  regatta::Request request_of(const std::string& line, size_t number) const {
    try {
      const Json given = Json::parse(line);
      regatta::Request made = request();
      if (given.contains("ids")) {
        made.prompt_ids = given.at("ids").get<std::vector<int32_t>>();
      } else {
        made.prompt = given.at(given.contains("src") ? "src" : "prompt").get<std::string>();
      }
      return made;
    } catch (const Json::exception& error) {
      throw UsageError("line " + std::to_string(number) + ": " + error.what());
    }
  }

  const Arguments& arguments_;
  // Callbacks write these until the engine has closed, behind an exception too.
  std::vector<Answer> answers_;
  std::vector<Clock::time_point> first_, last_;
  regatta::Engine engine_;
  uint32_t dice_ = 1;
};

int answer(const Arguments& arguments, const regatta::Options& options, bool has_text) {
  Run run(arguments, options);
  if (arguments.has("--bench")) {
    long long num_in = 0, num_out = 0;
    if (std::sscanf(arguments.values.at("--bench").c_str(), "%lld,%lld", &num_in, &num_out) != 2 ||
        num_in < 1 || num_out < 1) {
      throw UsageError("--bench is '" + arguments.values.at("--bench") +
                       "' (allowed: two numbers, such as 512,64)");
    }
    return run.bench(num_in, num_out);
  }
  if (arguments.has("--data_file")) {
    const std::string path = arguments.values.at("--data_file");
    if (path == "-") return run.lines(std::cin, has_text);
    std::ifstream file(path);
    if (!file) throw UsageError("cannot read " + path);
    return run.lines(file, has_text);
  }
  regatta::Request request = run.request();
  if (arguments.has("--ids")) {
    std::istringstream ids(arguments.values.at("--ids"));
    for (int32_t id; ids >> id;) request.prompt_ids.push_back(id);
    if (!ids.eof()) throw UsageError("--ids is no list of numbers");
    return run.one(request, false);
  }
  if (!arguments.has("--prompt")) throw UsageError("give --prompt, --ids, --data_file or --bench");
  request.prompt = arguments.values.at("--prompt");
  return run.one(request, true);
}

int with_tokenizer(const Arguments& arguments) {
  regatta::Options options = options_of(arguments);
  if (arguments.has("--memory")) {
    const regatta_memory sum = regatta::sum_memory(arguments.folder, options);
    std::printf("weights %lld, cache %lld (%lld blocks), a step %lld, limit %lld\n",
                static_cast<long long>(sum.weights), static_cast<long long>(sum.cache),
                static_cast<long long>(sum.num_blocks), static_cast<long long>(sum.step),
                static_cast<long long>(sum.limit));
    return 0;
  }
#ifdef WITH_TEXT
  regatta_text* opened = nullptr;
  int from_text = 0;
  const regatta_status status =
      regatta_text_of_folder(arguments.folder.c_str(), &opened, &from_text);
  if (status == REGATTA_OK) {
    const std::unique_ptr<regatta_text, void (*)(regatta_text*)> text(opened, regatta_text_close);
    const regatta_tokenizer tokenizer = regatta_tokenizer_of(opened);
    options.tokenizer = &tokenizer;
    return answer(arguments, options, true);
  }
  const std::string said = from_text ? regatta_text_error() : regatta_error();
  if (status != REGATTA_UNSUPPORTED) throw std::runtime_error(said);
  std::fprintf(stderr, "%s\n", said.c_str());
#endif
  return answer(arguments, options, false);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc == 2 && std::string(argv[1]) == "--help") {
      std::cout << kUsage;
      return 0;
    }
    return with_tokenizer(parse(argc, argv));
  } catch (const UsageError& error) {
    std::fprintf(stderr, "regatta-run: %s\n\n%s", error.what(), kUsage);
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "regatta-run: %s\n", error.what());
    return 1;
  }
}
