// Keeps the page up to date: each event reloads the live part, and important ones are announced to screen readers.
// Without JavaScript, the pages are the same, but do not change by themselves.
(() => {
  "use strict";
  const spoken = {
    "published": "is on the remote",
    "nochange": "was on the remote already",
    "dead-lettered": "failed",
    "nopaths": "failed",
    "failed": "failed and will be retried",
    "cancelled": "was cancelled",
  };
  const names = ["start", ...Object.keys(spoken), "superseded", "quarantined", "revived", "paused", "resumed",
    "worker-started", "worker-stopped", "warning", "condition", "snapshot", "status"];
  const live = () => document.getElementById("live");
  let timer = 0;
  let latest = 0;
  let kept = null;
  let said = [];

  function refresh() {
    timer = 0;
    const part = live();
    if (part && part.hasAttribute("data-live") && !document.hidden && window.htmx) {
      latest = Date.now();
      window.htmx.trigger(part, "news");
    }
  }

  function soon() {
    if (timer) return;
    const part = live();
    const least = part && part.hasAttribute("data-slow") ? 10000 : 400;
    timer = setTimeout(refresh, Math.max(60, latest + least - Date.now()));
  }

  function say(text) {
    said.push(text);
    if (said.length > 1) return;
    setTimeout(() => {
      const box = document.getElementById("announce");
      if (box) box.textContent = said.length > 3 ? `${said.length} posts have changed.` : said.join(" ");
      said = [];
    }, 600);
  }

  function show(state) {
    const box = document.getElementById("live-state");
    if (!box) return;
    box.hidden = false;
    document.getElementById("live-word").textContent = state;
  }

  function count(status) {
    const badge = document.getElementById("failed-count");
    if (!badge || !status.jobs) return;
    badge.hidden = !status.jobs.failed;
    badge.firstChild.textContent = status.jobs.failed;
  }

  // Whether a form on the page has something that a reload would take away.
  function isHalfFilled() {
    return [...document.querySelectorAll("main form")].some((form) => form.closest("details[open]")
      || [...form.querySelectorAll("input:not([type=hidden])")].some((each) => each.value !== each.defaultValue));
  }

  function reload(delay) {
    setTimeout(() => {
      if (isHalfFilled()) reload(Math.min(2 * delay, 60000));
      else window.location.reload();
    }, delay);
  }

  // Fixes can be copied; times that are relative go on, and each says what it is for the visitor and in UTC.
  function dress() {
    for (const code of document.querySelectorAll("code[data-copy]:not([data-done])")) {
      const button = document.createElement("button");
      code.dataset.done = "";
      button.type = "button";
      button.className = "plain copy";
      button.textContent = "Copy";
      button.addEventListener("click", () => {
        window.getSelection().selectAllChildren(code);
        if (navigator.clipboard) navigator.clipboard.writeText(code.textContent).then(() => say("Copied."));
        button.textContent = navigator.clipboard ? "Copied" : "Selected";
      });
      code.after(" ", button);
    }
    for (const time of document.querySelectorAll("time[datetime]")) {
      const at = new Date(time.dateTime);
      time.title = `${at.toLocaleString("en-GB")} for you, ${at.toUTCString()}`;
      if (time.hasAttribute("data-ago")) time.textContent = relative((Date.now() - at) / 1000);
    }
  }

  function relative(passed) {
    const units = [["days", 86400], ["h", 3600], ["min", 60], ["s", 1]];
    const [unit, size] = units.find(([name, each]) => Math.abs(passed) >= (name === "s" ? 1 : 2 * each) || name === "s");
    const number = Math.round(Math.abs(passed) / size);
    if (!number) return "now";
    return passed > 0 ? `${number} ${unit} ago` : `in ${number} ${unit}`;
  }

  let source = null;
  let wait = Number(sessionStorage.getItem("wait")) || 1000;
  function open() {
    const stream = new EventSource(document.getElementById("main").dataset.events);
    stream.onopen = () => {
      wait = 1000;
      sessionStorage.removeItem("wait");
      show("connected");
    };
    stream.onerror = () => {
      show("not connected");
      wait = Math.min(2 * wait, 60000);
      sessionStorage.setItem("wait", wait);
      if (stream.readyState === EventSource.CLOSED) {
        reload(wait); // signed out, or refused: the reloaded page shows which
        return;
      }
      stream.close(); // by itself, it would try again every two seconds
      setTimeout(() => { if (source === stream) source = open(); }, wait);
    };
    for (const name of names) {
      stream.addEventListener(name, (event) => {
        let data = {};
        try { data = JSON.parse(event.data); } catch { return; }
        if (name === "snapshot" || name === "status") count(data);
        if (spoken[name] && data.slug) say(`${data.slug} ${spoken[name]}.`);
        soon();
      });
    }
    return stream;
  }

  // Only while the tab is visible: over HTTP/1.1 a browser has six connections to a host for all its tabs, and a
  // seventh tab would wait for ever.
  function listen() {
    if (!document.getElementById("failed-count") || !window.EventSource) return;
    if (!document.hidden) source = open();
    const leave = () => {
      if (source) source.close();
      source = null;
    };
    window.addEventListener("pagehide", leave);
    window.addEventListener("pageshow", (event) => { if (event.persisted) window.location.reload(); });
    document.addEventListener("visibilitychange", () => {
      if (document.hidden) {
        leave();
        return;
      }
      if (!source) {
        show("connecting");
        source = open();
      }
      soon();
    });
  }

  // Selector of the focused element, to focus the same one in the reloaded part.
  function focused(part) {
    const each = document.activeElement;
    if (!each || each === part || !part.contains(each)) return null;
    if (each.id) return { selector: `#${CSS.escape(each.id)}`, start: each.selectionStart, end: each.selectionEnd };
    const box = each.closest("[id]").id;
    const href = each.getAttribute("href");
    const which = href ? `[href="${CSS.escape(href)}"]` : "";
    return { selector: `#${CSS.escape(box)} ${each.localName}${which}` };
  }

  function refocus(place) {
    const each = place && document.querySelector(place.selector);
    if (!each || each === document.activeElement) return;
    each.focus({ preventScroll: true });
    if (typeof place.start === "number") each.setSelectionRange(place.start, place.end);
  }

  // Keep opened details and typed text when the part around them is reloaded.
  document.addEventListener("htmx:beforeSwap", () => {
    const part = live();
    if (!part) return;
    kept = {
      open: [...part.querySelectorAll("details[open][id]")].map((each) => each.id),
      typed: [...part.querySelectorAll("input[id]:not([type=hidden]), select[id]")].map((each) => [each.id, each.value]),
      focus: focused(part),
    };
  });
  document.addEventListener("htmx:afterSwap", dress);
  document.addEventListener("htmx:afterSwap", () => {
    if (!kept) return;
    for (const id of kept.open) {
      const each = document.getElementById(id);
      if (each) each.open = true;
    }
    for (const [id, value] of kept.typed) {
      const each = document.getElementById(id);
      if (each) each.value = value;
    }
    refocus(kept.focus);
    kept = null;
  });
  // Signed out meanwhile: the answer is the sign-in page, which has no live part.
  document.addEventListener("htmx:responseError", () => show("not connected"));

  dress();
  setInterval(dress, 5000);
  listen();
})();
