// Parses Prometheus' text format, as far as this server uses it.

/** Name of a series -> its value, summed over all labels. */
export function readMetrics(text) {
  const sums = new Map();
  for (const line of text.split("\n")) {
    const match = /^([A-Za-z_:][\w:]*)(?:\{.*\})? (\S+)/.exec(line);
    if (match) sums.set(match[1], (sums.get(match[1]) ?? 0) + Number(match[2]));
  }
  return sums;
}
