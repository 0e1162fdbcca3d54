/* Regatta::text as an engine's tokenizer. Who includes this links both libraries; neither needs the
 * other.
 *
 *   regatta_text* text = NULL;
 *   regatta_tokenizer tokenizer;
 *   int from_text = 0;
 *   if (regatta_text_of_folder(folder, &text, &from_text) != REGATTA_OK) {
 *     puts(from_text ? regatta_text_error() : regatta_error());
 *   }
 *   tokenizer = regatta_tokenizer_of(text);
 *   options.tokenizer = &tokenizer;
 *   ...
 *   regatta_close(engine);
 *   regatta_text_close(text);
 */
#ifndef REGATTA_WITH_TEXT_H_
#define REGATTA_WITH_TEXT_H_

#include <stdlib.h>
#include <string.h>

#include "regatta.h"
#include "regatta_text.h"

#ifdef __cplusplus
extern "C" {
#endif

static inline int regatta_with_text_encode(void* self, const char* utf8, size_t size,
                                           int add_special, int32_t* ids, size_t capacity,
                                           size_t* num_ids) {
  return regatta_text_encode((const regatta_text*)self, utf8, size,
                             add_special ? REGATTA_TEXT_ADD_SPECIAL : REGATTA_TEXT_PLAIN, ids,
                             capacity, num_ids);
}

static inline int regatta_with_text_decode(void* self, const int32_t* ids, size_t num_ids,
                                           int skip_special, char* utf8, size_t capacity,
                                           size_t* size) {
  return regatta_text_decode((const regatta_text*)self, ids, num_ids,
                             skip_special ? REGATTA_TEXT_SKIP_SPECIAL : REGATTA_TEXT_PLAIN, utf8,
                             capacity, size);
}

static inline int regatta_with_text_stream_open(void* self, const int32_t* prompt_ids,
                                                size_t num_prompt_ids, void** stream) {
  regatta_text_stream* opened = NULL;
  const int status = regatta_text_stream_open((const regatta_text*)self, prompt_ids, num_prompt_ids,
                                              REGATTA_TEXT_SKIP_SPECIAL, &opened);
  *stream = opened;
  return status;
}

static inline int regatta_with_text_stream_add(void* stream, int32_t id, regatta_string* piece,
                                               regatta_string* pending) {
  regatta_text_stream* const opened = (regatta_text_stream*)stream;
  const int status = regatta_text_stream_add(opened, &id, 1, &piece->data, &piece->size);
  if (status != REGATTA_TEXT_OK) return status;
  return regatta_text_stream_pending(opened, &pending->data, &pending->size);
}

static inline int regatta_with_text_stream_finish(void* stream, regatta_string* piece) {
  return regatta_text_stream_finish((regatta_text_stream*)stream, &piece->data, &piece->size);
}

static inline void regatta_with_text_stream_close(void* stream) {
  regatta_text_stream_close((regatta_text_stream*)stream);
}

/* The tokenizer that an engine takes. text must be there until regatta_close() has returned. */
static inline regatta_tokenizer regatta_tokenizer_of(regatta_text* text) {
  regatta_tokenizer made;
  made.struct_size = sizeof made;
  made.self = text;
  made.encode = regatta_with_text_encode;
  made.decode = regatta_with_text_decode;
  made.stream_open = regatta_with_text_stream_open;
  made.stream_add = regatta_with_text_stream_add;
  made.stream_finish = regatta_with_text_stream_finish;
  made.stream_close = regatta_with_text_stream_close;
  made.error = regatta_text_error;
  return made;
}

/* Opens the tokenizer of a folder; *text is null where that fails. from_text (may be null): 1 where
 * regatta_text_error() says what was wrong, 0 where regatta_error() does. REGATTA_UNSUPPORTED: the
 * folder has none and runs on ids. */
static inline regatta_status regatta_text_of_folder(const char* folder, regatta_text** text,
                                                    int* from_text) {
  size_t size = 0;
  char* path = NULL;
  regatta_status status = regatta_tokenizer_file(folder, NULL, 0, &size);
  *text = NULL;
  if (from_text != NULL) *from_text = 0;
  if (status != REGATTA_TOO_SMALL) return status;
  path = (char*)malloc(size);
  if (path == NULL) return REGATTA_NO_MEMORY;
  status = regatta_tokenizer_file(folder, path, size, &size);
  if (status == REGATTA_OK && regatta_text_open(path, text) != REGATTA_TEXT_OK) {
    status = REGATTA_BAD_FOLDER;
    if (from_text != NULL) *from_text = 1;
  }
  free(path);
  return status;
}

#ifdef __cplusplus
}
#endif
#endif /* REGATTA_WITH_TEXT_H_ */
