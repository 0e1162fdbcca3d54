/* Runs the folder that `export/export_model.py --runtime` writes. No Python, no framework.
 *
 * A plain C interface. Every call that can fail returns a status, and regatta_error() says what was
 * wrong in the calling thread's last failing call. No exception crosses it, nothing is printed, and
 * no call ends the process. docs/cpp.md is its page.
 *
 * Structs begin with `struct_size`. The library reads and writes no further, so that programs
 * compiled against an older header run with a newer library. Make them with their _init function,
 * which also gives each field its default.
 *
 * Threads. Any thread may submit, cancel and count at any time. One thread at a time steps:
 * the caller's in regatta_step(), or with `own_thread` the library's. Callbacks run on that thread,
 * one at a time, with no lock held. They may submit, cancel and count, but not step, wait or close:
 * REGATTA_BUSY.
 */
#ifndef REGATTA_H_
#define REGATTA_H_

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32) || defined(__APPLE__)
#error "libregatta_runtime is built for Linux only"
#endif

#define REGATTA_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/* Of this interface: rises with what is added. What would break callers raises the SONAME. */
#define REGATTA_VERSION 1

typedef enum {
  REGATTA_OK = 0,
  REGATTA_INVALID = 1,     /* an argument: a null pointer, a number out of range, an unknown id */
  REGATTA_BAD_FOLDER = 2,  /* cannot be opened: damaged, for another machine, or too large */
  REGATTA_UNSUPPORTED = 3, /* what this library does not do, or not without a tokenizer */
  REGATTA_TOO_SMALL = 4,   /* the buffer; the size that is needed was written */
  REGATTA_NO_MEMORY = 5,
  REGATTA_FAILED = 6,
  REGATTA_BUSY = 7 /* a call that may not be made now: on a callback, or beside a step */
} regatta_status;

typedef struct regatta_engine regatta_engine;

typedef struct {
  const char* data; /* UTF-8 */
  size_t size;
} regatta_string;

typedef struct {
  const int32_t* data;
  size_t size;
} regatta_ids;

/* Turns text into ids and ids into text. regatta_with_text.h makes one of Regatta::text; a caller's
 * own works as well. Functions return 0 when done; else error() on the same thread says why. A
 * thread that submits calls encode and stream_open, decode for stop strings, and stream_close for a
 * request that is refused; several may at a time, beside the one that steps. That one calls the
 * rest, for a stream one call at a time. They must work until regatta_close() has returned. */
typedef struct {
  size_t struct_size; /* sizeof(regatta_tokenizer) of the caller */
  void* self;
  /* Writes at most `capacity` ids, and how many there are. Where they are more, it writes none and
   * returns 4. add_special: 1 with the ids that the model wants around a text, 0 without. */
  int (*encode)(void* self, const char* utf8, size_t size, int add_special, int32_t* ids,
                size_t capacity, size_t* num_ids);
  /* The text of ids, likewise. skip_special: 1: special tokens have none. */
  int (*decode)(void* self, const int32_t* ids, size_t num_ids, int skip_special, char* utf8,
                size_t capacity, size_t* size);
  /* The text that ids add behind a prompt, without special tokens. */
  int (*stream_open)(void* self, const int32_t* prompt_ids, size_t num_prompt_ids, void** stream);
  /* piece: whole UTF-8 that became certain with an id. pending: what would follow it were there no
   * more ids, without a character's beginning at the end. Valid until the stream's next call. */
  int (*stream_add)(void* stream, int32_t id, regatta_string* piece, regatta_string* pending);
  int (*stream_finish)(void* stream, regatta_string* piece);
  void (*stream_close)(void* stream);
  const char* (*error)(void);
} regatta_tokenizer;

typedef enum { REGATTA_LOG_INFO = 1, REGATTA_LOG_WARNING = 2 } regatta_log_level;

/* How a folder is opened. Fields that say 1 are off with 0. */
typedef struct {
  size_t struct_size;
  int64_t memory_limit; /* bytes of weights, cache and a step; 0: what is available */
  int64_t num_blocks;   /* of the KV cache; 0: what the batch needs, twice with prefixes */
  int64_t batch_size;   /* requests in a step, at most */
  int64_t max_num_batched_tokens; /* tokens of a step, at most; 0: 512, or batch_size if more */
  int64_t max_length;             /* of a request, prompt and answer; 0: the folder's, the most */
  int64_t num_threads;    /* of the process's pool, which all engines share; 0: as they are */
  int64_t prefix_caching; /* 1: full blocks are kept and shared */
  int64_t own_thread;     /* 1: a thread of the engine steps; 0: the caller does */
  int64_t verify;         /* 1: every byte is compared with its digest, 0.6 s a gigabyte */
  int64_t seed;           /* of requests that have none of their own */
  const regatta_tokenizer* tokenizer; /* null: ids alone, and no stop strings. Copied */
  void (*log)(void* log_user, regatta_log_level level, const char* text); /* null: nobody hears */
  void* log_user;
} regatta_options;

/* What opening takes, in bytes. */
typedef struct {
  size_t struct_size;
  int64_t weights; /* mapped */
  int64_t cache;
  int64_t step; /* values of a step, roughly */
  int64_t limit;
  int64_t num_blocks;
} regatta_memory;

typedef struct {
  size_t struct_size;
  const char* model_type; /* valid until regatta_close() */
  const char* dtype;      /* of activations: "float32", "bfloat16" or "float16" */
  int64_t vocab_size;
  int64_t max_length;
  int64_t block_size;
  int64_t num_blocks;
  int64_t block_bytes;
  const int32_t* stop_ids; /* end an answer unless ignore_eos is set */
  int64_t num_stop_ids;
} regatta_info;

typedef enum {
  REGATTA_UNFINISHED = 0,
  REGATTA_STOP = 1,      /* a stop id or a stop string */
  REGATTA_LENGTH = 2,    /* as many tokens as may be */
  REGATTA_CANCELLED = 3, /* by regatta_cancel() or regatta_close() */
  REGATTA_ERROR = 4      /* `error` says what */
} regatta_finish;

/* What is new of one request. Pointers are valid during the callback. */
typedef struct {
  size_t struct_size; /* of what the library wrote */
  int64_t id;
  const int32_t* ids; /* [num_ids] new tokens of the answer, one that ends it included */
  int64_t num_ids;
  const char* text; /* whole UTF-8 that is certain, with a 0 behind; joined it is the answer's */
  int64_t text_size;
  const float* logprobs;        /* [num_ids] natural logarithms; null where none were asked for */
  const int32_t* ranks;         /* [num_ids] 1: the likeliest */
  int64_t num_likeliest;        /* K */
  const int32_t* likeliest_ids; /* [num_ids, K] the likeliest first */
  const float* likeliest_logprobs; /* [num_ids, K] */
  int64_t finish;                  /* a regatta_finish; above 0 in a request's last event */
  const char* error;               /* null but with REGATTA_ERROR */
  int64_t num_cached_tokens;       /* of the prompt, that the prefix cache had */
} regatta_event;

typedef void (*regatta_callback)(void* user, const regatta_event* event);

/* What is asked. Fields are those of predict.SamplingParams: docs/sampling.md. */
typedef struct {
  size_t struct_size;
  regatta_ids prompt_ids;    /* or, where they are null, a text: */
  regatta_string prompt;     /* needs a tokenizer, which adds what the model wants around a text */
  regatta_callback callback; /* null: nobody hears */
  void* user;
  int64_t max_new_tokens;       /* 0: as many as max_length has room for */
  int64_t min_new_tokens;       /* below, nothing but a length ends the answer */
  double temperature;           /* 0: greedy */
  int64_t top_k;                /* 0: off; 1: greedy */
  double top_p;                 /* 1: off; 0: greedy */
  double min_p;                 /* 0: off */
  double typical_p;             /* 1: off */
  double repetition_penalty;    /* 1: off */
  double presence_penalty;      /* 0: off */
  double frequency_penalty;     /* 0: off */
  int64_t no_repeat_ngram_size; /* 0: off */
  const int32_t* bias_ids;      /* [num_biases], each once: added to logits ahead of all else */
  const double* biases;         /* [num_biases] */
  size_t num_biases;
  const regatta_ids* bad_words; /* [num_bad_words] never completed */
  size_t num_bad_words;
  int64_t has_seed; /* 1: `seed` is the request's own */
  int64_t seed;
  regatta_ids stop_ids;       /* end the answer, as the folder's do */
  int64_t ignore_eos;         /* 1: the folder's do not */
  const regatta_string* stop; /* [num_stop] end the answer's text; need a tokenizer */
  size_t num_stop;
  int64_t include_stop; /* 1: the text ends behind them, not before */
  int64_t num_logprobs; /* likeliest tokens to name beside each new one, 0 .. 20; -1: no logprobs */
} regatta_request;

/* Counts since the engine was opened, and what holds now. */
typedef struct {
  size_t struct_size;
  int64_t num_steps;
  int64_t num_scheduled_tokens; /* that these computed */
  int64_t num_prompt_tokens;    /* that were taken in */
  int64_t num_output_tokens;
  int64_t num_prefix_hit_tokens; /* of prompts, found in the cache */
  int64_t num_preemptions;
  int64_t num_running; /* now, as the rest below */
  int64_t num_waiting;
  int64_t num_cache_blocks;
  int64_t num_used_blocks; /* that unfinished requests hold */
  int64_t num_free_blocks; /* those with a cached prefix included */
} regatta_counters;

/* REGATTA_VERSION of the library that runs. */
REGATTA_API uint32_t regatta_version(void);

/* What was wrong; "" without a failure so far. Valid until the thread's next failing call. */
REGATTA_API const char* regatta_error(void);

/* Write each field's default, up to `struct_size` bytes. Of a request, what the folder recommends
 * (generation_config.json), or for a null engine what a request has by itself. */
REGATTA_API regatta_status regatta_options_init(regatta_options* options, size_t struct_size);
REGATTA_API regatta_status regatta_request_init(const regatta_engine* engine,
                                                regatta_request* request, size_t struct_size);

/* Adds up what opening would take. No weight is read. options: null for defaults. */
REGATTA_API regatta_status regatta_sum_memory(const char* folder, const regatta_options* options,
                                              regatta_memory* memory);

/* Whether each file of a folder is the one that the export wrote, byte for byte. */
REGATTA_API regatta_status regatta_verify(const char* folder);

/* The path of a folder's tokenizer, with a 0 behind it, for regatta_text_open(). size: of both. */
REGATTA_API regatta_status regatta_tokenizer_file(const char* folder, char* path, size_t capacity,
                                                  size_t* size);

/* Opens a folder. *engine is null where it fails. Its files are mapped: leave them as they are. */
REGATTA_API regatta_status regatta_open(const char* folder, const regatta_options* options,
                                        regatta_engine** engine);

/* Ends every request (REGATTA_CANCELLED, by its callback) and frees all. Null is fine. No other
 * thread may use the engine from then on. From a callback: REGATTA_BUSY, and nothing happens. */
REGATTA_API regatta_status regatta_close(regatta_engine* engine);

REGATTA_API regatta_status regatta_describe(const regatta_engine* engine, regatta_info* info);
REGATTA_API regatta_status regatta_count(const regatta_engine* engine, regatta_counters* counters);

/* Queues a request and copies what it points to. *id is its number. One that is refused has no
 * events; one that is taken has a last event in any case. */
REGATTA_API regatta_status regatta_submit(regatta_engine* engine, const regatta_request* request,
                                          int64_t* id);

/* Ends a request ahead of the next step. REGATTA_INVALID where it has ended or never was. */
REGATTA_API regatta_status regatta_cancel(regatta_engine* engine, int64_t id);

/* Runs a step and its callbacks. *ran (may be null) is 0 where there was nothing to do. A network
 * that fails ends the requests of its step as REGATTA_ERROR; the call is REGATTA_OK. */
REGATTA_API regatta_status regatta_step(regatta_engine* engine, int64_t* ran);

/* Returns when every request has ended: of an engine with `own_thread`. */
REGATTA_API regatta_status regatta_wait(regatta_engine* engine);

#ifdef __cplusplus
}
#endif
#endif /* REGATTA_H_ */
