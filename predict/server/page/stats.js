// How fast an answer came.

/** Measures one answer. The clock's numbers are in milliseconds. */
export class Watch {
  constructor(clock = () => performance.now()) {
    this.clock = clock;
    this.start = clock();
    this.first = null; // when the first piece came
    this.last = this.start;
    this.usage = null;
  }

  /** Notes that an event came: hasText when it brought a piece of the answer. */
  note(event, hasText) {
    if (hasText) {
      this.last = this.clock();
      this.first ??= this.last;
    }
    const usage = event?.usage;
    if (Number.isFinite(usage?.completion_tokens)) this.usage = usage;
  }

  /**
   * num_tokens of the answer and of the prompt (null when the server does not say), seconds to the
   * first piece and in all, and tokens per second behind the first: null when all came at once.
   */
  stats() {
    const tokens = this.usage?.completion_tokens ?? null;
    const span = this.first === null ? 0 : (this.last - this.first) / 1000;
    return {
      numTokens: tokens,
      numPromptTokens: this.usage?.prompt_tokens ?? null,
      firstS: this.first === null ? null : (this.first - this.start) / 1000,
      totalS: (this.clock() - this.start) / 1000,
      perSecond: tokens > 1 && span > 0.001 ? (tokens - 1) / span : null,
    };
  }
}

/** Seconds in words: ms below one second. */
export function duration(seconds) {
  return seconds < 1
    ? `${Math.round(seconds * 1000)} ms`
    : `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
}

/** The parts of the line below an answer. */
export function statsWords(stats) {
  const words = [];
  if (stats.perSecond !== null) words.push(`${stats.perSecond.toFixed(1)} tokens/s`);
  if (stats.numTokens !== null) words.push(`${count(stats.numTokens)} tokens`);
  if (stats.firstS !== null) words.push(`first after ${duration(stats.firstS)}`);
  words.push(`${duration(stats.totalS)} in all`);
  if (stats.numPromptTokens !== null) words.push(`prompt ${count(stats.numPromptTokens)} tokens`);
  return words;
}

function count(number) {
  return number.toLocaleString("en");
}
