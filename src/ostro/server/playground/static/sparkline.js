// A line plot of the last minute, with the newest value at the right.

import { svg } from "./dom.js";

const POINTS = 60;
const WIDTH = 100;
const HEIGHT = 24;

export class Sparkline {
  #values = [];

  /** `most` is the value at the top edge; the default is the largest value shown. */
  constructor(most) {
    this.most = most;
    this.node = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
    this.area = svg("path", { class: "area" });
    this.line = svg("path", { class: "line" });
    this.node.append(this.area, this.line);
  }

  add(value) {
    this.#values = [...this.#values, value].slice(-POINTS);
    const top = this.most ?? Math.max(...this.#values, 1e-9);
    const first = POINTS - this.#values.length;
    const points = this.#values.map((each, index) => {
      const x = ((first + index) * WIDTH) / (POINTS - 1);
      return `${x.toFixed(1)} ${(HEIGHT - 1 - Math.min(each / top, 1) * (HEIGHT - 3)).toFixed(1)}`;
    });
    const path = `M${points.join("L")}`;
    this.line.setAttribute("d", path);
    this.area.setAttribute("d", `${path}V${HEIGHT}H${((first * WIDTH) / (POINTS - 1)).toFixed(1)}Z`);
  }
}
