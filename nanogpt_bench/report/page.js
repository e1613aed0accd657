"use strict";
(() => {
  const { styles, xs, charts: data } = JSON.parse(document.getElementById("charts").textContent);
  // What traces share is in the page once: their style, their x, and the labels of a heat map's columns.
  for (const chart of data) {
    chart.traces = chart.traces.map(({ style, x, labels, ...own }) => {
      const trace = { ...styles[style], ...own, x: xs[x] };
      return labels ? { ...trace, customdata: own.z.map(() => labels) } : trace;
    });
  }
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const hidden = new Set();
  let round = 0;

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // "@3", "@ink" and "@sequential" stand for colours and colour scales, which differ between a light and a dark page.
  const inTheme = (text) => {
    const entry = /^@(\w+)$/.exec(text);
    if (!entry) return text;
    return css(/^\d/.test(entry[1]) ? `--c${entry[1]}` : `--${entry[1]}`);
  };
  const scaleInTheme = (text) => {
    const colours = inTheme(text).split(" ");
    return colours.map((colour, i) => [i / (colours.length - 1), colour]);
  };
  const colourKeys = new Set(["color", "fillcolor", "bgcolor"]);
  const themed = (node, key) => {
    if (typeof node === "string") {
      if (key === "colorscale") return scaleInTheme(node);
      return colourKeys.has(key) ? inTheme(node) : node;
    }
    if (Array.isArray(node)) return key === "z" || key === "x" || key === "y" ? node : node.map((item) => themed(item, key));
    if (node === null || typeof node !== "object") return node;
    const copy = {};
    for (const [name, value] of Object.entries(node)) copy[name] = themed(value, name);
    return copy;
  };

  const layoutOf = (chart) => {
    const layout = themed(chart.layout);
    const line = { gridcolor: css("--rule"), linecolor: css("--rule"), zerolinecolor: css("--muted") };
    layout.xaxis = { ...layout.xaxis, ...line };
    layout.yaxis = { ...layout.yaxis, ...line };
    layout.font = { color: css("--ink"), family: "system-ui, sans-serif", size: 13 };
    layout.paper_bgcolor = layout.plot_bgcolor = "rgba(0,0,0,0)";
    layout.hoverlabel = { bgcolor: css("--page"), bordercolor: css("--rule"), font: { color: css("--ink") } };
    return layout;
  };
  const tracesOf = (chart) =>
    chart.traces.map((trace) => {
      const copy = themed(trace);
      copy.visible = !(trace.meta && hidden.has(trace.meta.row));
      return copy;
    });

  const draw = async (chart) => {
    const place = document.getElementById(`chart-${chart.name}`);
    const options = { responsive: true, displaylogo: false, displayModeBar: false, typesetMath: false };
    return Plotly.react(place, tracesOf(chart), layoutOf(chart), options);
  };
  // A few charts at a time, so that a long page can be read while the rest is drawn; a later call takes over.
  const waiting = new Set();
  const drawAll = async (wanted) => {
    const own = ++round;
    wanted.forEach((chart) => waiting.add(chart));
    let begun = performance.now();
    for (const chart of data.filter((chart) => waiting.has(chart))) {
      waiting.delete(chart);
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
  const shows = (chart, row) => chart.traces.some((trace) => trace.meta && trace.meta.row === row);

  for (const key of document.querySelectorAll("button.key")) {
    key.addEventListener("click", () => {
      const row = key.dataset.row;
      if (!hidden.delete(row)) hidden.add(row);
      for (const twin of document.querySelectorAll("button.key")) {
        if (twin.dataset.row === row) twin.setAttribute("aria-pressed", String(!hidden.has(row)));
      }
      drawAll(data.filter((chart) => shows(chart, row)));
    });
  }
  // A chart in a closed page has no width until the page opens.
  for (const page of document.querySelectorAll("details.page")) {
    page.addEventListener("toggle", () => {
      for (const plot of page.querySelectorAll(".js-plotly-plot")) if (page.open) Plotly.Plots.resize(plot);
    });
  }
  const openTarget = () => {
    const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (target && target.matches("details")) target.open = true;
  };
  window.addEventListener("hashchange", openTarget);
  openTarget();
  dark.addEventListener("change", () => drawAll(data));
  drawAll(data);
})();
