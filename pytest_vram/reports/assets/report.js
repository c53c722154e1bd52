"use strict";
(() => {
  const root = document.documentElement;
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const colour = name => getComputedStyle(root).getPropertyValue("--" + name).trim();
  const words = bill => bill.replaceAll("_", " ");
  const UNITS = [["GiB", 2 ** 30, 2], ["MiB", 2 ** 20, 1], ["KiB", 2 ** 10, 1]];

  function size(bytes) {
    for (const [unit, factor, digits] of UNITS)
      if (Math.abs(bytes) >= factor) return (bytes / factor).toFixed(digits) + " " + unit;
    return bytes ? bytes + " B" : "0";
  }

  function element(tag, text, className) {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  }

  function swatch(bill) {
    const made = element("span", undefined, "swatch");
    made.style.background = `var(--${bill})`;
    return made;
  }

  // ---- data blocks: differences, in units of the allocator

  const cache = new Map();
  function dataOf(key) {
    if (!cache.has(key)) cache.set(key, JSON.parse(document.getElementById(key + "-data").textContent));
    return cache.get(key);
  }

  function sums(steps, unit) {
    let value = 0;
    return steps.map(step => (value += step) * unit);
  }

  function timelineOf(data) {
    const raw = data.timeline;
    const line = {
      events: raw.events, marks: raw.marks,
      spans: raw.spans.map(([start, end, bytes, ...ids]) => [start, end, bytes, ...ids.map(id => raw.names[id])]),
      at: sums(raw.at, 1), reserved: sums(raw.reserved, raw.unit),
      bills: Object.entries(raw.bills).map(([name, steps]) => [name, sums(steps, raw.unit)]),
    };
    line.allocated = line.at.map((_, i) => line.bills.reduce((sum, [, values]) => sum + values[i], 0));
    line.peak = line.allocated.indexOf(Math.max(...line.allocated));
    return line;
  }

  function phaseAt(line, event) {
    let found = "before any phase";
    for (const [at, name, step] of line.marks) {
      if (at > event) break;
      found = step ? `${name}, step ${step}` : name;
    }
    return found;
  }

  // ---- charts

  const POWERS = Array.from({length: 34}, (_, i) => 2 ** (i + 9));
  const axis = more => ({
    stroke: colour("soft"), grid: {stroke: colour("line"), width: 0.5},
    ticks: {stroke: colour("line"), width: 0.5}, font: "12px system-ui, sans-serif", ...more,
  });

  function stacked(line) {
    let below = line.at.map(() => 0);
    return line.bills.map(([, values]) => (below = values.map((value, i) => value + below[i])));
  }

  function timelineChart(holder, data, line, onMove) {
    const sums = stacked(line);
    const stepped = uPlot.paths.stepped({align: 1});
    const top = Math.max(...line.reserved, ...line.allocated);
    const lines = data.lines.filter(([, value]) => value <= 1.6 * top);
    const limit = 1.12 * Math.max(top, ...lines.map(([, value]) => value));
    const options = {
      width: holder.clientWidth, height: 340, legend: {show: false}, padding: [26, 12, 0, 0],
      cursor: {y: false, points: {show: false}, drag: {x: true, y: false, setScale: true}},
      scales: {x: {time: false}, y: {range: () => [0, limit]}},
      axes: [
        axis({values: (_, ticks) => ticks.map(String), label: "allocations and frees",
              labelSize: 18, labelFont: "12px system-ui, sans-serif", size: 34}),
        axis({values: (_, ticks) => ticks.map(size), incrs: POWERS, size: 78}),
      ],
      series: [
        {},
        ...line.bills.map(([bill]) => ({
          label: words(bill), stroke: colour(bill), width: 1, paths: stepped, points: {show: false},
          fill: colour(bill) + "b8",
        })),
        {label: "reserved", stroke: colour("soft"), width: 1.5, dash: [2, 3], paths: stepped,
         points: {show: false}},
      ],
      bands: line.bills.slice(1).map(([bill], i) => ({series: [i + 2, i + 1], fill: colour(bill) + "b8"})),
      hooks: {
        draw: [u => drawMarks(u, line), u => drawLines(u, lines), u => drawPeak(u, line)],
        setCursor: [u => u.cursor.idx != null && onMove(u.cursor.idx)],
      },
    };
    return new uPlot(options, [line.at, ...sums, line.reserved], holder);
  }

  function onCanvas(u, draw) {
    const context = u.ctx;
    const {left, top, width, height} = u.bbox;
    const ratio = uPlot.pxRatio;
    context.save();
    context.font = `${12 * ratio}px system-ui, sans-serif`;
    context.textAlign = "left";
    context.textBaseline = "alphabetic";
    context.setLineDash([]);
    draw(context, {left, top, width, height, right: left + width, bottom: top + height, ratio});
    context.restore();
  }

  function drawMarks(u, line) {
    onCanvas(u, (context, box) => {
      context.strokeStyle = context.fillStyle = colour("soft");
      context.lineWidth = box.ratio;
      context.setLineDash([3 * box.ratio, 4 * box.ratio]);
      // Labels do not overlap: one without room is left out, first those of what lies between steps.
      const taken = [];
      const minor = name => name === "between" || name === "setup";
      const marks = line.marks.slice().sort((one, other) => minor(one[1]) - minor(other[1]));
      for (const [at, name, step] of marks) {
        const x = Math.round(u.valToPos(at, "x", true));
        if (x < box.left || x > box.right) continue;
        context.globalAlpha = 0.45;
        context.beginPath();
        context.moveTo(x, box.top);
        context.lineTo(x, box.bottom);
        context.stroke();
        context.globalAlpha = 1;
        const label = step ? `${name} ${step}` : name;
        const end = x + context.measureText(label).width + 8 * box.ratio;
        if (end > box.right || taken.some(([from, to]) => x < to && from < end)) continue;
        taken.push([x, end]);
        context.fillText(label, x, box.top - 7 * box.ratio);
      }
    });
  }

  function drawLines(u, lines) {
    onCanvas(u, (context, box) => {
      context.lineWidth = 2 * box.ratio;
      const taken = [];
      for (const [name, value] of lines.slice().sort((one, other) => other[1] - one[1])) {
        const y = Math.round(u.valToPos(value, "y", true));
        context.strokeStyle = context.fillStyle = colour(name);
        context.setLineDash(name === "budget" ? [] : [7 * box.ratio, 4 * box.ratio]);
        context.beginPath();
        context.moveTo(box.left, y);
        context.lineTo(box.right, y);
        context.stroke();
        let place = y - 5 * box.ratio;
        while (taken.some(other => Math.abs(other - place) < 15 * box.ratio)) place += 15 * box.ratio;
        taken.push(place);
        const label = `${name} ${size(value)}`;
        outlined(context, box, label, box.right - context.measureText(label).width - 4 * box.ratio, place);
      }
    });
  }

  function outlined(context, box, label, x, y) {
    const ink = context.fillStyle;
    context.save();
    context.setLineDash([]);
    context.lineWidth = 3 * box.ratio;
    context.lineJoin = "round";
    context.strokeStyle = colour("page");
    context.strokeText(label, x, y);
    context.fillStyle = ink;
    context.fillText(label, x, y);
    context.restore();
  }

  function drawPeak(u, line) {
    onCanvas(u, (context, box) => {
      const x = u.valToPos(line.at[line.peak], "x", true);
      const y = u.valToPos(line.allocated[line.peak], "y", true);
      if (x < box.left || x > box.right) return;
      context.fillStyle = colour("ink");
      context.strokeStyle = colour("page");
      context.lineWidth = 2 * box.ratio;
      context.beginPath();
      context.arc(x, y, 4.5 * box.ratio, 0, 2 * Math.PI);
      context.fill();
      context.stroke();
      const label = `peak ${size(line.allocated[line.peak])}`;
      const width = context.measureText(label).width;
      const left = x + width + 10 * box.ratio > box.right ? x - width - 9 * box.ratio : x + 9 * box.ratio;
      outlined(context, box, label, left, y + 4 * box.ratio);
    });
  }

  function scalerChart(holder, data) {
    const steps = data.scaler.map(row => row[0]);
    const after = data.scaler.map(row => row[2]);
    const skipped = data.scaler.map(row => (row[3] ? row[2] : null));
    return new uPlot({
      width: holder.clientWidth, height: 160, legend: {show: false}, padding: [10, 12, 0, 0],
      cursor: {show: false},
      scales: {x: {time: false, range: (_, low, high) => [low - 0.3, high + 0.3]}, y: {distr: 3, log: 2}},
      axes: [axis({label: "step", labelSize: 18, size: 34, labelFont: "12px system-ui, sans-serif",
                   incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]}),
             axis({size: 78, values: (_, ticks) => ticks.map(tick => tick == null ? "" : String(tick))})],
      series: [
        {},
        {label: "scale", stroke: colour("link"), width: 2, paths: uPlot.paths.stepped({align: 1}),
         points: {show: true, size: 6}},
        {label: "skipped", stroke: colour("fail"), width: 0, paths: () => null,
         points: {show: true, size: 11, fill: colour("fail")}},
      ],
    }, [steps, after, skipped], holder);
  }

  // ---- one timeline with its slider and what was alive at the chosen moment

  class Timeline {
    constructor(figure) {
      this.figure = figure;
      this.holder = figure.querySelector(".chart");
      this.slider = figure.querySelector("input");
      this.data = dataOf(figure.dataset.of);
      this.line = timelineOf(this.data);
      this.index = this.line.peak;
      this.slider.max = this.line.at.length - 1;
      this.slider.addEventListener("input", () => this.go(Number(this.slider.value)));
      figure.querySelector(".to-peak").addEventListener("click", () => this.go(this.line.peak));
      const above = this.data.lines.filter(([, value]) =>
        value > 1.6 * Math.max(...this.line.reserved, ...this.line.allocated));
      if (above.length)
        figure.querySelector("figcaption").append(
          ` (above the chart: ${above.map(([name, value]) => `${name} ${size(value)}`).join(", ")})`);
      this.show(this.index);
    }

    draw() {
      if (this.chart || !this.holder.clientWidth) return;
      this.chart = timelineChart(this.holder, this.data, this.line, index => this.show(index));
    }

    erase() {
      if (this.chart) this.chart.destroy();
      this.chart = null;
    }

    fit() {
      if (this.chart) this.chart.setSize({width: this.holder.clientWidth, height: 340});
    }

    go(index) {
      this.show(index);
      if (this.chart)
        this.chart.setCursor({left: this.chart.valToPos(this.line.at[index], "x"), top: 10});
    }

    show(index) {
      const {line} = this;
      const event = line.at[index];
      this.index = index;
      this.slider.value = index;
      const when = `${phaseAt(line, event)}: ${size(line.allocated[index])} allocated, ` +
        `${size(line.reserved[index])} reserved${index === line.peak ? " (the peak)" : ""}`;
      this.slider.setAttribute("aria-valuetext", when);
      this.figure.querySelector(".when").textContent = `${when}, event ${event + 1} of ${line.events}`;
      this.fill(".alive", line.bills.filter(([, values]) => values[index]).map(([bill, values]) => {
        const name = element("td");
        name.append(swatch(bill), words(bill));
        return [name, element("td", size(values[index]), "figure")];
      }));
      const alive = line.spans.filter(([start, end]) => start <= event && event < end)
        .sort((one, other) => other[2] - one[2]).slice(0, 8);
      this.fill(".biggest", alive.map(([, , bytes, bill, tensor, operator, module, frame]) => {
        const what = element("td", undefined, "whole");
        what.append(swatch(bill), element("code", tensor));
        return [element("td", size(bytes), "figure"), what,
                element("td", [operator, module, frame].filter(Boolean).join("  "))];
      }));
    }

    fill(selector, rows) {
      const body = this.figure.querySelector(selector + " tbody");
      body.replaceChildren(...rows.map(cells => {
        const row = element("tr");
        row.append(...cells);
        return row;
      }));
    }
  }

  class Scaler {
    constructor(figure) {
      this.holder = figure.querySelector(".chart");
      this.data = dataOf(figure.dataset.of);
    }
    draw() {
      if (!this.chart && this.holder.clientWidth) this.chart = scalerChart(this.holder, this.data);
    }
    erase() {
      if (this.chart) this.chart.destroy();
      this.chart = null;
    }
    fit() {
      if (this.chart) this.chart.setSize({width: this.holder.clientWidth, height: 160});
    }
  }

  // Only what is near the window is drawn: hundreds of charts cost nothing until they are seen.
  const drawn = new Map();
  const seen = new IntersectionObserver(entries => {
    for (const {target, isIntersecting} of entries) {
      if (!drawn.has(target)) {
        if (!isIntersecting) continue;
        drawn.set(target, target.matches(".timeline") ? new Timeline(target) : new Scaler(target));
      }
      const figure = drawn.get(target);
      if (isIntersecting) figure.draw();
      else figure.erase();
    }
  }, {rootMargin: "400px"});
  all("figure").forEach(figure => seen.observe(figure));

  let resizing = 0;
  addEventListener("resize", () => {
    cancelAnimationFrame(resizing);
    resizing = requestAnimationFrame(() => drawn.forEach(figure => figure.fit()));
  });

  // ---- colours

  function redraw() {
    drawn.forEach(figure => {
      if (!figure.chart) return;
      figure.erase();
      figure.draw();
    });
  }
  const theme = document.getElementById("theme");
  theme.addEventListener("change", () => {
    if (theme.value) root.dataset.theme = theme.value;
    else delete root.dataset.theme;
    redraw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  all(".swatch[data-bill]").forEach(one => (one.style.background = `var(--${one.dataset.bill})`));

  // ---- the overview: links unfold, headings sort, fields filter

  function unfold() {
    const target = location.hash && document.getElementById(location.hash.slice(1));
    if (target && target.matches("details.test")) {
      target.open = true;
      target.hidden = false;
      target.scrollIntoView();
      target.querySelector("summary").focus({preventScroll: true});
    }
  }
  addEventListener("hashchange", unfold);
  addEventListener("click", event => {
    const link = event.target.closest && event.target.closest('a[href^="#t"]');
    if (link && link.hash === location.hash) unfold();
  });
  unfold();

  const table = document.getElementById("tests");
  if (!table) return;
  const body = table.tBodies[0];
  const rows = [...body.rows];

  table.tHead.addEventListener("click", event => {
    const button = event.target.closest("button");
    if (!button) return;
    const heading = button.closest("th");
    const column = heading.cellIndex;
    const text = button.dataset.kind === "text";
    const down = heading.getAttribute("aria-sort") === (text ? "ascending" : "none") ||
      (!text && heading.getAttribute("aria-sort") !== "descending");
    all("th", table.tHead).forEach(other => other.removeAttribute("aria-sort"));
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    const key = row => {
      const cell = row.cells[column];
      if (text) return cell.textContent.trim();
      return cell.dataset.sort === "" ? -Infinity : Number(cell.dataset.sort);
    };
    const order = (one, other) => text ? key(one).localeCompare(key(other)) : key(one) - key(other);
    body.append(...rows.slice().sort((one, other) => down ? order(other, one) : order(one, other)));
  });

  const find = document.getElementById("find");
  const show = document.getElementById("show");
  const found = document.getElementById("found");
  function filter() {
    const wanted = find.value.trim().toLowerCase();
    let count = 0;
    for (const row of rows) {
      const fits = (!show.value || row.dataset.mood === show.value) &&
        row.querySelector(".name").textContent.toLowerCase().includes(wanted);
      row.hidden = !fits;
      document.getElementById(row.dataset.test).hidden = !fits;
      count += fits;
    }
    found.textContent = count === rows.length ? "" : `${count} of ${rows.length} tests`;
  }
  find.addEventListener("input", filter);
  show.addEventListener("change", filter);
  find.form.addEventListener("submit", event => event.preventDefault());
})();
