/* Text to token ids and back, by the file that export/export_text.py writes.
 *
 * A plain C interface. Every call that can fail returns a status, and regatta_text_error() says
 * what was wrong in the calling thread's last failing call. No exception crosses it, and nothing is
 * printed. Several threads may use one regatta_text at a time, and each stream one thread at a
 * time. Texts are UTF-8 with a length; they may hold zero bytes. docs/runtime-format.md describes
 * the file.
 */
#ifndef REGATTA_TEXT_H_
#define REGATTA_TEXT_H_

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32) || defined(__APPLE__)
#error "regatta_text is built for Linux only"
#endif

#define REGATTA_TEXT_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/* Of this interface: rises with a change that callers compiled before would notice. */
#define REGATTA_TEXT_VERSION 1

typedef enum {
  REGATTA_TEXT_OK = 0,
  REGATTA_TEXT_INVALID = 1,     /* an argument: a null pointer, bad UTF-8, an unknown flag */
  REGATTA_TEXT_BAD_FILE = 2,    /* the file cannot be read, or is damaged */
  REGATTA_TEXT_UNSUPPORTED = 3, /* another version, or a step that this build leaves out */
  REGATTA_TEXT_TOO_SMALL = 4,   /* the buffer; the size that is needed was written */
  REGATTA_TEXT_NO_MEMORY = 5,
  REGATTA_TEXT_FAILED = 6 /* a library underneath, such as a regular expression that gives up */
} regatta_text_status;

typedef enum {
  REGATTA_TEXT_PLAIN = 0,
  REGATTA_TEXT_ADD_SPECIAL = 1,  /* encode: the ids that the model wants around a text */
  REGATTA_TEXT_LITERAL = 2,      /* encode: special tokens in the text are text */
  REGATTA_TEXT_SKIP_SPECIAL = 4, /* decode, stream: special tokens have no text */
} regatta_text_flags;

typedef struct regatta_text regatta_text;
typedef struct regatta_text_stream regatta_text_stream;

/* REGATTA_TEXT_VERSION of the library that runs. */
REGATTA_TEXT_API uint32_t regatta_text_version(void);

/* What was wrong; "" without a failure so far. Valid until the thread's next failing call. */
REGATTA_TEXT_API const char* regatta_text_error(void);

/* Opens a file, or `size` bytes of one, which are copied. *text is null where it fails. */
REGATTA_TEXT_API regatta_text_status regatta_text_open(const char* path, regatta_text** text);
REGATTA_TEXT_API regatta_text_status regatta_text_read(const void* data, size_t size,
                                                       regatta_text** text);

/* Null is fine. Streams of the text stay usable. */
REGATTA_TEXT_API void regatta_text_close(regatta_text* text);

/* One more than the highest id that may have a text; 0 for null. */
REGATTA_TEXT_API int32_t regatta_text_num_ids(const regatta_text* text);

/* Writes the ids of a text, at most `capacity`, and how many there are. Where they are more than
 * `capacity`, none is written and the status is REGATTA_TEXT_TOO_SMALL. */
REGATTA_TEXT_API regatta_text_status regatta_text_encode(const regatta_text* text, const char* utf8,
                                                         size_t size, uint32_t flags, int32_t* ids,
                                                         size_t capacity, size_t* num_ids);

/* Writes the text of ids, without a zero byte behind it; as regatta_text_encode otherwise. An id
 * that no token has gives no text; a negative one is an error. Broken UTF-8 becomes U+FFFD. */
REGATTA_TEXT_API regatta_text_status regatta_text_decode(const regatta_text* text,
                                                         const int32_t* ids, size_t num_ids,
                                                         uint32_t flags, char* utf8,
                                                         size_t capacity, size_t* size);

/* A stream of the text that ids add behind those of a prompt, which may be none. */
REGATTA_TEXT_API regatta_text_status regatta_text_stream_open(const regatta_text* text,
                                                              const int32_t* prompt_ids,
                                                              size_t num_prompt_ids, uint32_t flags,
                                                              regatta_text_stream** stream);

/* Gives the text that became certain with these ids: whole UTF-8, often none. It stays valid until
 * the stream's next call. Joined, the pieces are the text of all ids. */
REGATTA_TEXT_API regatta_text_status regatta_text_stream_add(regatta_text_stream* stream,
                                                             const int32_t* ids, size_t num_ids,
                                                             const char** piece, size_t* size);

/* Gives the last piece: bytes that were held back, as U+FFFD where they make no character.
 * Ids may be added behind it: they go on where it ends, and no byte of before joins theirs. */
REGATTA_TEXT_API regatta_text_status regatta_text_stream_finish(regatta_text_stream* stream,
                                                                const char** piece, size_t* size);

/* Gives the text that would follow the pieces so far were there no more ids, without U+FFFD at its
 * end. The stream stays as it is, and its last piece valid; this text, until the next call. */
REGATTA_TEXT_API regatta_text_status regatta_text_stream_pending(regatta_text_stream* stream,
                                                                 const char** text, size_t* size);

/* Null is fine. */
REGATTA_TEXT_API void regatta_text_stream_close(regatta_text_stream* stream);

#ifdef __cplusplus
}
#endif
#endif /* REGATTA_TEXT_H_ */
