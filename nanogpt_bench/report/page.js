"use strict";
(() => {
  const { config, charts } = JSON.parse(document.getElementById("charts").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const hidden = new Set();
  let round = 0;

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  // {"$": "c3"} stands for a colour or a colour scale, which differ between a light and a dark page.
  const themed = (node) => {
    if (Array.isArray(node)) return node.map(themed);
    if (node === null || typeof node !== "object") return node;
    if ("$" in node) return css(`--${node.$}`).includes(" ") ? css(`--${node.$}`).split(" ") : css(`--${node.$}`);
    return Object.fromEntries(Object.entries(node).map(([key, part]) => [key, key === "data" ? part : themed(part)]));
  };

  // What lies under the pointer, as plain text.
  const tip = document.body.appendChild(document.createElement("div"));
  tip.className = "tip";
  const say = (text, event) => {
    tip.textContent = text;
    tip.hidden = !text;
    if (!text) return;
    const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 6);
    tip.style.left = `${Math.max(6, left)}px`;
    tip.style.top = `${Math.max(6, event.clientY - tip.offsetHeight - 10)}px`;
  };
  say("");
  const told = (value) =>
    typeof value === "object" ? Object.entries(value).map(([name, text]) => `${name}: ${text}`).join("\n") : value;

  const digits = (number) => String(Number(number.toPrecision(5)));
  // The point of a curve nearest to the pointer, if one is near.
  const nearest = (chart, [x, y]) => {
    const { place: { view }, spec } = chart;
    const [across, up] = [view.scale("x"), view.scale("y")];
    let best = { distance: 30 * 30 };
    for (const line of spec.data.values) {
      if (hidden.has(line.row) && chart.rows.length) continue;
      line.x.forEach((at, i) => {
        if (line.y[i] === null) return;
        const distance = (across(at) - x) ** 2 + (up(line.y[i]) - y) ** 2;
        if (distance < best.distance) best = { distance, line, at, i };
      });
    }
    if (!best.line) return "";
    const { line, at, i } = best;
    return `${line.name}\n${line.text ? line.text[i] : digits(at)}: ${digits(line.y[i])}`;
  };

  // A drag magnifies, two presses go back; a finger scrolls the page instead.
  const box = document.body.appendChild(document.createElement("div"));
  box.className = "box";
  box.hidden = true;
  const inside = (chart, event) => {
    const frame = chart.place.querySelector("svg").getBoundingClientRect();
    const [left, top] = chart.place.view.origin();
    return [event.clientX - frame.left - left, event.clientY - frame.top - top];
  };
  const magnify = (chart, corners) => {
    const { view } = chart.place;
    for (const [i, axis] of [...chart.drag].entries()) {
      const ends = corners && corners.map((corner) => view.scale(axis).invert(corner[i])).sort((a, b) => a - b);
      view.signal(`zoom_${axis}`, ends);
    }
    view.runAsync();
  };
  const watch = (chart) => {
    const { place } = chart;
    let start = null;
    const curves = chart.spec.data.values.every((line) => line.x && line.y);
    place.addEventListener("pointermove", (event) => {
      if (start) {
        const [x, y] = [Math.min(start.clientX, event.clientX), Math.min(start.clientY, event.clientY)];
        Object.assign(box.style, { left: `${x}px`, top: `${y}px` });
        box.style.width = `${Math.abs(start.clientX - event.clientX)}px`;
        box.style.height = `${Math.abs(start.clientY - event.clientY)}px`;
        box.hidden = false;
      } else if (curves && chart.place.view && !chart.told) say(nearest(chart, inside(chart, event)), event);
    });
    place.addEventListener("pointerleave", () => say(""));
    place.addEventListener("dblclick", () => chart.drag && magnify(chart, null));
    place.addEventListener("pointerdown", (event) => {
      if (chart.place.view && chart.drag && event.pointerType === "mouse" && event.button === 0) start = event;
      if (start) event.preventDefault();
    });
    window.addEventListener("pointerup", (event) => {
      if (start && Math.hypot(start.clientX - event.clientX, start.clientY - event.clientY) > 8) {
        magnify(chart, [inside(chart, start), inside(chart, event)]);
      }
      if (start) box.hidden = true;
      start = null;
    });
  };

  const draw = async (chart) => {
    const spec = themed(chart.spec);
    if (chart.rows.length) spec.params = [{ name: "hidden", value: [...hidden] }];
    if (chart.place.view) chart.place.view.finalize();
    const { view } = await vegaEmbed(chart.place, spec, {
      mode: "vega-lite",
      config: themed(config),
      ast: true, // expressions are interpreted: the page may not compile any
      actions: false,
      defaultStyle: false,
      renderer: "svg",
      tooltip: (handler, event, item, value) => {
        chart.told = value !== null && value !== undefined && value !== "";
        say(chart.told ? told(value) : "", event);
      },
    });
    view.logLevel(1); // a chart whose rows are all hidden has no extent, which is no news
    chart.place.view = view;
  };
  // A few charts at a time, so that a long page can be read while the rest is drawn; a later call takes over.
  const drawAll = async () => {
    const own = ++round;
    let begun = performance.now();
    for (const chart of charts) {
      // One chart that can't be drawn leaves its place empty, and no other.
      await draw(chart).catch((error) => console.error(chart.name, error));
      if (performance.now() - begun > 60) {
        await new Promise((go) => setTimeout(go));
        begun = performance.now();
      }
      if (own !== round) return;
    }
    document.documentElement.dataset.charts = "drawn";
  };

  for (const chart of charts) {
    chart.place = document.getElementById(`chart-${chart.name}`);
    watch(chart);
  }
  for (const key of document.querySelectorAll("button.key")) {
    key.addEventListener("click", () => {
      const row = key.dataset.row;
      if (!hidden.delete(row)) hidden.add(row);
      for (const twin of document.querySelectorAll("button.key")) {
        if (twin.dataset.row === row) twin.setAttribute("aria-pressed", String(!hidden.has(row)));
      }
      for (const chart of charts) {
        if (chart.place.view && chart.rows.includes(row)) chart.place.view.signal("hidden", [...hidden]).runAsync();
      }
    });
  }
  // A chart in a closed page has no width until the page opens.
  for (const page of document.querySelectorAll("details.page")) {
    page.addEventListener("toggle", () => window.dispatchEvent(new Event("resize")));
  }
  const openTarget = () => {
    const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (target && target.matches("details")) target.open = true;
  };
  window.addEventListener("hashchange", openTarget);
  openTarget();
  dark.addEventListener("change", drawAll);
  drawAll();
})();
