(function () {
  'use strict';

  // Charts: show the numbers of the step under the pointer. Without this script each strip keeps its title element.
  var tip = document.getElementById('tip');
  function place(x, y) {
    var width = tip.offsetWidth, height = tip.offsetHeight;
    tip.style.left = Math.max(4, Math.min(x + 14, document.documentElement.clientWidth - width - 4)) + 'px';
    tip.style.top = (y + 18 + height > window.innerHeight ? Math.max(4, y - height - 10) : y + 18) + 'px';
  }
  document.querySelectorAll('.hit').forEach(function (hit) {
    var title = hit.querySelector('title'), text = title.textContent;
    title.remove();
    hit.addEventListener('pointermove', function (e) {
      tip.textContent = text;
      tip.hidden = false;
      place(e.clientX, e.clientY);
    });
    hit.addEventListener('pointerleave', function () { tip.hidden = true; });
  });
  window.addEventListener('scroll', function () { tip.hidden = true; }, {passive: true});
  window.addEventListener('beforeprint', function () {
    document.querySelectorAll('details').forEach(function (d) { d.open = true; });
  });

  // The table of checks: three buttons and a search field.
  var table = document.getElementById('checktable');
  if (!table) return;
  var show = 'all', find = document.getElementById('find'), buttons = document.querySelectorAll('[data-show]');
  var all = Array.prototype.map.call(table.tBodies[0].rows, function (row) {
    return {row: row, text: row.textContent.toLowerCase()};
  });
  function filter() {
    var wanted = find.value.toLowerCase(), any = false;
    all.forEach(function (a) {
      var on = (show === 'all' || a.row.classList.contains(show)) && a.text.indexOf(wanted) >= 0;
      a.row.hidden = !on;
      any = any || on;
    });
    document.getElementById('nothing').hidden = any;
  }
  buttons.forEach(function (button) {
    button.addEventListener('click', function () {
      show = button.dataset.show;
      buttons.forEach(function (other) { other.setAttribute('aria-pressed', String(other === button)); });
      filter();
    });
  });
  find.addEventListener('input', filter);
})();
