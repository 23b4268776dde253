package interop;

import co.cask.cdap.common.conf.CConfiguration;
import co.cask.cdap.common.conf.Constants.MessagingSystem;
import com.google.gson.Gson;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.List;
import java.util.concurrent.TimeUnit;
import org.apache.tephra.TxConstants;

/**
 * A command line for CDAP's and Tephra's classes, with JSON lines on standard output, logs on standard error, and exit
 * code 1 for any failure. {@code DIR} is always {@code messaging.local.data.dir}, the folder of the three
 * {@code system.tms.*} databases; commands open it in place, like CDAP. Without arguments, each line of standard input
 * is a command line as a JSON array, and its output ends with an empty line; the first failure ends the program.
 */
public final class Main {
  private Main() {
  }

  public static void main(String[] args) {
    int status = 1;
    try {
      Output out = new Output();
      if (args.length > 0) {
        run(Arrays.asList(args), out);
      } else {
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
          run(Arrays.asList(new Gson().fromJson(line, String[].class)), out);
          out.end();
        }
      }
      out.flush();
      status = 0;
    } catch (Exception e) {
      e.printStackTrace();
    }
    // Not all threads of CDAP and Tephra are daemons.
    System.exit(status);
  }

  private static void run(List<String> words, Output out) throws Exception {
    String command = words.get(0);
    Arguments args = new Arguments(words.subList(1, words.size()));
    switch (command) {
      case "dump" -> Reading.dump(args.expect(1), out);
      case "raw" -> Reading.raw(args.expect(2), out);
      case "read-service" -> Reading.service(args.expect(1, "--snapshot", "--messages"), out);
      case "write" -> RandomStore.write(
          args.expect(2, "--now", "--rows", "--topics", "--payload-bytes", "--snapshots", "--kill"), out);
      case "fill" -> Pruning.fill(args.expect(1, "--now", "--rows", "--topics", "--payload-bytes", "--kill"), out);
      case "prune" -> Pruning.prune(args.expect(1, "--now"), out);
      case "snapshot" -> Snapshots.print(args.expect(1), out);
      case "write-snapshot" -> Snapshots.write(args.expect(1), out);
      default -> throw new IllegalArgumentException("unknown command " + command);
    }
  }

  /** Returns CDAP's default settings with the given data directory. */
  static CConfiguration configuration(String dir) {
    CConfiguration conf = CConfiguration.create();
    conf.set(MessagingSystem.LOCAL_DATA_DIR, dir);
    // CDAP checks the time of a publish against the system clock, but tests write stores of any time.
    conf.setLong(TxConstants.Manager.CFG_TX_MAX_LIFETIME, TimeUnit.DAYS.toSeconds(365L * 1000));
    return conf;
  }
}
