"use strict";
(() => {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const button = document.getElementById("theme");
  const drawn = new Map(); // chart id -> index of the view it shows
  let figures = {};
  let plotly = null;

  // --- theme: the reader's choice, else the system's ---
  function stored() {
    try { return localStorage.getItem("attnscope-theme"); } catch { return null; }
  }
  function setTheme(theme) {
    root.dataset.theme = theme;
    button.textContent = theme === "dark" ? "light" : "dark";
    button.setAttribute("aria-label", "switch to " + button.textContent);
    for (const [id, view] of drawn) draw(id, view);
  }
  setTheme(stored() || (dark.matches ? "dark" : "light"));
  button.hidden = false;
  button.addEventListener("click", () => {
    const theme = root.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("attnscope-theme", theme); } catch { /* private mode: the choice lasts for this view */ }
    setTheme(theme);
  });
  dark.addEventListener("change", () => { if (!stored()) setTheme(dark.matches ? "dark" : "light"); });

  // --- charts ---
  function resolve(value, colors) {
    if (typeof value === "string") {
      const name = /^var\((--[a-z0-9-]+)\)$/.exec(value);
      return name ? colors.getPropertyValue(name[1]).trim() || value : value;
    }
    if (Array.isArray(value)) return value.map((item) => resolve(item, colors));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, resolve(item, colors)]));
  }

  function draw(id, view) {
    const style = getComputedStyle(root);
    const figure = resolve(figures[id][view], style);
    figure.layout.font.family = getComputedStyle(document.body).fontFamily;
    if (matchMedia("(pointer: coarse)").matches) figure.layout.dragmode = false; // a finger scrolls the page
    const place = document.getElementById(id);
    if (place.clientWidth < 480) figure.layout.xaxis.nticks = 4;
    place.style.minHeight = figure.layout.height + "px";
    drawn.set(id, view);
    plotly.react(id, figure.data, figure.layout, {
      responsive: true, displayModeBar: false, displaylogo: false, doubleClick: "reset", showTips: false,
    });
  }

  function choose(event) {
    const { chart, view } = event.currentTarget.dataset;
    for (const other of event.currentTarget.parentNode.children) {
      other.setAttribute("aria-pressed", String(other === event.currentTarget));
    }
    draw(chart, Number(view));
  }

  async function inflate(text) {
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  }

  async function start() {
    const packed = document.getElementById("plotly");
    if (packed === null) return;
    if (typeof DecompressionStream === "undefined") {
      document.getElementById("no-charts").hidden = false;
      return;
    }
    const script = document.createElement("script");
    script.textContent = await inflate(packed.textContent);
    packed.remove();
    document.head.append(script);
    plotly = window.Plotly;
    const data = document.getElementById("figures");
    figures = JSON.parse(data.type === "application/json" ? data.textContent : await inflate(data.textContent));
    root.classList.add("drawn");
    const plots = [...document.querySelectorAll(".plot")];
    // Drawn when they come near the screen: a suite has hundreds.
    const near = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) {
        if (isIntersecting && !drawn.has(target.id)) draw(target.id, 0);
      }
    }, { rootMargin: "600px 0px" });
    plots.forEach((plot) => near.observe(plot));
    addEventListener("beforeprint", () => plots.forEach((plot) => drawn.has(plot.id) || draw(plot.id, 0)));
    document.querySelectorAll("[data-chart]").forEach((item) => item.addEventListener("click", choose));
  }

  start().catch((error) => {
    const notice = document.getElementById("no-charts");
    notice.textContent = "The charts could not be drawn (" + error + "). Everything they show stands in the tables.";
    notice.hidden = false;
  });
})();
